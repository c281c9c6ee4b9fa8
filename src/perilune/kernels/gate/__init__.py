"""The sigmoid gate of attention's output."""

from __future__ import annotations

import torch

from perilune.kernels.common.cases import BF16, EXACT_FP32, normal
from perilune.kernels.registry import Inputs, OpSpec


def _inputs(
    generator: torch.Generator,
    dtype: torch.dtype,
    tokens: int,
    heads: int,
    width: int,
    scale: float = 1.0,
) -> Inputs:
    return {
        "o_THV": normal(generator, dtype, tokens, heads, width),
        "gate_TC": normal(generator, dtype, tokens, heads * width, scale=scale),
    }


def _by_head(generator: torch.Generator, dtype: torch.dtype) -> Inputs:
    """As a product of every head with all tokens leaves it."""
    o_HTV = normal(generator, dtype, 3, 4, 6)
    return _inputs(generator, dtype, 4, 3, 6) | {
        "o_THV": o_HTV.detach().transpose(0, 1).requires_grad_()
    }


SPEC = OpSpec(
    name="sigmoid_gate",
    signature="(o_THV, gate_TC) -> y_TC",
    reference="perilune.kernels.gate.reference:sigmoid_gate",
    oracle="perilune.kernels.gate.oracle:sigmoid_gate",
    backends={"cuda": "perilune.kernels.gate.triton:sigmoid_gate"},
    cases={
        "small": lambda g, d: _inputs(g, d, 4, 2, 5),
        "one_token": lambda g, d: _inputs(g, d, 1, 3, 8),
        "by_head": _by_head,
        "saturated": lambda g, d: _inputs(g, d, 5, 2, 7, scale=60.0),
        "beyond_a_tile": lambda g, d: _inputs(g, d, 3, 9, 130),
    },
    tolerance=EXACT_FP32,
    backend_tolerance={"cuda": EXACT_FP32 | BF16},
    traits="perilune.kernels.gate.traits:SPEC",
)
