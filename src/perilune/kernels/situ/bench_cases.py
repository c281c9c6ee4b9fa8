"""Sizes and least work of SiTU-GLU: gate and up read, their product written.

Backward: both and the gradient of the product read, two gradients written.
"""

from __future__ import annotations

import torch

from perilune.kernels.bench.cases import Bench, Case, Make, Work, drawn
from perilune.kernels.registry import Inputs
from perilune.kernels.situ.bench_peers import FLA


def rows(tokens: int, inner: int, *, caps: bool = True) -> Make:
    beta, linear_beta = (4.0, 25.0) if caps else (None, None)

    def make(generator: torch.Generator, dtype: torch.dtype) -> Inputs:
        gate_up_2I = drawn(generator, dtype, tokens, 2 * inner, scale=3.0)
        return {"gate_up_2I": gate_up_2I, "beta": beta, "linear_beta": linear_beta}

    return make


def work(inputs: Inputs, backward: bool) -> Work:
    x = inputs["gate_up_2I"]
    passes = 8 if backward else 3
    return Work(
        passes * x.numel() // 2 * x.element_size(), (30 if backward else 10) * x.numel() // 2
    )


_GPU = {"device": "cuda", "dtype": torch.bfloat16}
_SWI_GLU = {"device": "cuda", "dtype": torch.bfloat16, "peers": (FLA,)}


BENCHES = {
    "situ": Bench(
        inside="both caps and the product",
        work=work,
        cases={
            "T8_I16384": Case(make=rows(8, 16384)),
            "T8192_I3072": Case(make=rows(8192, 3072), **_GPU),
            "T8192_I3072_backward": Case(make=rows(8192, 3072), backward=True, **_GPU),
            "T8192_I33792": Case(make=rows(8192, 33792), **_GPU),
            "T8192_I33792_backward": Case(make=rows(8192, 33792), backward=True, **_GPU),
            "T8192_I3072_uncapped": Case(make=rows(8192, 3072, caps=False), **_SWI_GLU),
            "T8192_I3072_uncapped_backward": Case(
                make=rows(8192, 3072, caps=False), backward=True, **_SWI_GLU
            ),
        },
    ),
}
