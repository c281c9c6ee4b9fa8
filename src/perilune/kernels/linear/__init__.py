"""Matrix products with a weight that may be held narrower than the tokens."""

from __future__ import annotations

import torch

from perilune.kernels.common.cases import BF16, FP32, normal
from perilune.kernels.registry import Inputs, OpSpec, Tolerance


def _narrow(generator: torch.Generator, dtype: torch.dtype, tokens: int) -> Inputs:
    weight_OI = normal(generator, torch.float32, 21, 37).detach().bfloat16()
    return {"x_TI": normal(generator, dtype, tokens, 37), "weight_OI": weight_OI}


def _columns(generator: torch.Generator, dtype: torch.dtype) -> Inputs:
    """Several splits of the columns, and a second tile of rows."""
    return {
        "x_TI": normal(generator, dtype, 19, 200),
        "weight_OI": normal(generator, torch.promote_types(dtype, torch.float32), 70, 200),
    }


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
SCORES = OpSpec(
    name="scores",
    signature="(x_TI, weight_OI) -> y_TO",
    reference="perilune.kernels.linear.reference:scores",
    oracle="perilune.kernels.linear.oracle:linear",
    backends={
        "cpu": "perilune.kernels.linear.cpu:scores",
        "cuda": "perilune.kernels.linear.triton:scores",
    },
    cases={**SPEC.cases, "wide_weight_many_columns": _columns},
    tolerance=FP32,
    # The result is fp32 whatever the tokens are; only gradients are rounded to their leaves.
    backend_tolerance={"cuda": FP32 | {torch.bfloat16: Tolerance(forward=2e-5, backward=1e-2)}},
    traits="perilune.kernels.linear.traits:SCORES",
)
