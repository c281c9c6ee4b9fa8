"""Sizes and least work of AttnRes: every source read once, the mixture written.

Backward: the sources and the gradient of the mixture read, the sources' gradients written.
"""

from __future__ import annotations

import torch

from perilune.kernels.attn_res.bench_peers import FLA
from perilune.kernels.bench.cases import Bench, Case, Make, Work, drawn
from perilune.kernels.registry import Inputs


def read(sources: int, tokens: int, width: int) -> Make:
    def make(generator: torch.Generator, dtype: torch.dtype) -> Inputs:
        return {
            "sources_NTD": drawn(generator, dtype, sources, tokens, width),
            "query_D": drawn(generator, dtype, width),
            "eps": 1e-5,
        }

    return make


def work(inputs: Inputs, backward: bool) -> Work:
    """Bytes = T D (N + 1) e, and T D (2 N + 1) e more; flops: squares, scores and mixture, two
    each, and eight more."""
    n, t, d = inputs["sources_NTD"].shape
    rows = n + 1 + (2 * n + 1 if backward else 0)
    flops = (14 if backward else 6) * n * t * d
    return Work(t * d * rows * inputs["sources_NTD"].element_size(), flops)


_GPU = {"device": "cuda", "dtype": torch.bfloat16, "peers": (FLA,)}


BENCHES = {
    "attn_res": Bench(
        inside="norm of the sources, scores, softmax, mixture",
        work=work,
        cases={
            "N9_T8_D7168": Case(make=read(9, 8, 7168)),
            "N4_T8192_D7168": Case(make=read(4, 8192, 7168), **_GPU),
            "N9_T8192_D7168": Case(make=read(9, 8192, 7168), **_GPU),
            "N4_T8192_D7168_backward": Case(make=read(4, 8192, 7168), backward=True, **_GPU),
            "N9_T8192_D7168_backward": Case(make=read(9, 8192, 7168), backward=True, **_GPU),
            "N9_T32_D7168": Case(make=read(9, 32, 7168), graph=True, **_GPU),
        },
    ),
}
