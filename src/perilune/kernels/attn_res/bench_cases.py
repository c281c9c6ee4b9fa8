"""Sizes and least work of AttnRes: every source read once, the mixture written."""

from __future__ import annotations

import torch

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
    """Bytes = T D (N + 1) e; flops: squares, scores and mixture, two each."""
    n, t, d = inputs["sources_NTD"].shape
    return Work(t * d * (n + 1) * inputs["sources_NTD"].element_size(), 6 * n * t * d)


BENCHES = {
    "attn_res": Bench(
        inside="norm of the sources, scores, softmax, mixture",
        work=work,
        cases={
            "N9_T8_D7168": Case(make=read(9, 8, 7168)),
            "N4_T8192_D7168": Case(make=read(4, 8192, 7168), device="cuda", dtype=torch.bfloat16),
            "N9_T8192_D7168": Case(make=read(9, 8192, 7168), device="cuda", dtype=torch.bfloat16),
            "N9_T32_D7168": Case(
                make=read(9, 32, 7168), device="cuda", dtype=torch.bfloat16, graph=True
            ),
        },
    ),
}
