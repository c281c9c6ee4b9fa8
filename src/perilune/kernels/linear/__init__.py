"""Matrix product with a weight that may be held narrower than the tokens."""

from __future__ import annotations

import torch

from perilune.kernels.common.cases import BF16, FP32, normal
from perilune.kernels.registry import Inputs, OpSpec


def _narrow(generator: torch.Generator, dtype: torch.dtype, tokens: int) -> Inputs:
    weight_OI = normal(generator, torch.float32, 21, 37).detach().bfloat16()
    return {"x_TI": normal(generator, dtype, tokens, 37), "weight_OI": weight_OI}


SPEC = OpSpec(
    name="linear",
    signature="(x_TI, weight_OI) -> y_TO",
    reference="perilune.kernels.linear.reference:linear",
    oracle="perilune.kernels.linear.oracle:linear",
    backends={
        "cpu": "perilune.kernels.linear.cpu:linear",
        "cuda": "perilune.kernels.linear.cublas:linear",
    },
    cases={
        "plain": lambda g, d: {
            "x_TI": normal(g, d, 5, 37),
            "weight_OI": normal(g, d, 21, 37),
        },
        "bf16_weight_one_token": lambda g, d: _narrow(g, d, 1),
        "bf16_weight_few_tokens": lambda g, d: _narrow(g, d, 7),
    },
    tolerance=FP32,
    backend_tolerance={"cuda": FP32 | BF16},
    traits="perilune.kernels.linear.traits:SPEC",
)
