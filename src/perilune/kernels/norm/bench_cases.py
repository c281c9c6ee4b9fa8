"""Sizes and least work of the norms: every operand read once, the result written."""

from __future__ import annotations

import torch

from perilune.kernels.bench.cases import Bench, Case, Make, Work, drawn, num_bytes
from perilune.kernels.norm.bench_peers import FLA, FLA_GATED
from perilune.kernels.registry import Inputs


def rows(*shape: int, gated: bool = False) -> Make:
    def make(generator: torch.Generator, dtype: torch.dtype) -> Inputs:
        gate = {"gate_D": drawn(generator, dtype, *shape)} if gated else {}
        return {
            "x_D": drawn(generator, dtype, *shape),
            **gate,
            "weight_D": drawn(generator, torch.float32 if gated else dtype, shape[-1]),
            "eps": 1e-5,
        }

    return make


def work(inputs: Inputs, backward: bool) -> Work:
    """Backward: operands and the gradient of the result read, a gradient an operand written."""
    x, operands = inputs["x_D"], 2 if "gate_D" in inputs else 1
    passes = operands + 1
    if backward:
        passes += operands + 1 + operands
    return Work(passes * num_bytes(x), 4 * x.numel() * (3 if backward else 1))


_GPU = {"device": "cuda", "dtype": torch.bfloat16, "peers": (FLA,)}
_GATED = {"device": "cuda", "dtype": torch.bfloat16, "peers": (FLA_GATED,)}

BENCHES = {
    "rms_norm": Bench(
        inside="norm and weight",
        work=work,
        cases={
            "T8_D16384": Case(make=rows(8, 16384)),
            "T8192_D7168": Case(make=rows(8192, 7168), **_GPU),
            "T8192_D7168_backward": Case(make=rows(8192, 7168), backward=True, **_GPU),
        },
    ),
    "gated_rms_norm": Bench(
        inside="norm, weight and sigmoid gate",
        work=work,
        cases={
            "T8_H96_D128": Case(make=rows(8, 96, 128, gated=True)),
            "T8192_H96_D128": Case(make=rows(8192, 96, 128, gated=True), **_GATED),
            "T8192_H96_D128_backward": Case(
                make=rows(8192, 96, 128, gated=True), backward=True, **_GATED
            ),
        },
    ),
}
