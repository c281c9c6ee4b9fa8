"""Sizes and least work of the sigmoid gate: both operands read, their product written.

Backward: both and the gradient of the product read, two gradients written.
"""

from __future__ import annotations

import torch

from perilune.kernels.bench.cases import Bench, Case, Make, Work, drawn, num_bytes
from perilune.kernels.registry import Inputs


def heads(tokens: int, count: int, width: int) -> Make:
    def make(generator: torch.Generator, dtype: torch.dtype) -> Inputs:
        return {
            "o_THV": drawn(generator, dtype, tokens, count, width),
            "gate_TC": drawn(generator, dtype, tokens, count * width),
        }

    return make


def work(inputs: Inputs, backward: bool) -> Work:
    o_THV, gate_TC = inputs["o_THV"], inputs["gate_TC"]
    passes = 8 if backward else 3
    size = (num_bytes(o_THV) + num_bytes(gate_TC)) // 2
    return Work(passes * size, (16 if backward else 6) * o_THV.numel())


_GPU = {"device": "cuda", "dtype": torch.bfloat16}

BENCHES = {
    "sigmoid_gate": Bench(
        inside="the sigmoid and the product",
        work=work,
        cases={
            "T8_H4_V32": Case(make=heads(8, 4, 32)),
            "T128_H96_V128": Case(make=heads(128, 96, 128), graph=True, **_GPU),
            "T8192_H96_V128": Case(make=heads(8192, 96, 128), **_GPU),
            "T8192_H96_V128_backward": Case(make=heads(8192, 96, 128), backward=True, **_GPU),
        },
    ),
}
