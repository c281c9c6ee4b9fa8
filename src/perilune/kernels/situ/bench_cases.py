"""Sizes and least work of SiTU-GLU: gate and up read, their product written."""

from __future__ import annotations

import torch

from perilune.kernels.bench.cases import Bench, Case, Make, Work, drawn
from perilune.kernels.registry import Inputs


def rows(tokens: int, inner: int) -> Make:
    def make(generator: torch.Generator, dtype: torch.dtype) -> Inputs:
        gate_up_2I = drawn(generator, dtype, tokens, 2 * inner, scale=3.0)
        return {"gate_up_2I": gate_up_2I, "beta": 4.0, "linear_beta": 25.0}

    return make


def work(inputs: Inputs, backward: bool) -> Work:
    x = inputs["gate_up_2I"]
    return Work(3 * x.numel() // 2 * x.element_size(), 10 * x.numel() // 2)


BENCHES = {
    "situ": Bench(
        inside="both caps and the product",
        work=work,
        cases={
            "T8_I16384": Case(make=rows(8, 16384)),
            "T8192_I3072": Case(make=rows(8192, 3072), device="cuda", dtype=torch.bfloat16),
        },
    ),
}
