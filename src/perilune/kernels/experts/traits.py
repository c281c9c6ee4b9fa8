"""Routed experts for the property checks."""

from __future__ import annotations

import torch

from perilune.kernels.common.cases import normal
from perilune.kernels.common.few_tokens import MAX_TOKENS, few_tokens
from perilune.kernels.registry import Inputs
from perilune.kernels.traits import Traits

EXPERTS, ACTIVE = 5, 2


def _make(
    generator: torch.Generator, dtype: torch.dtype, lengths: tuple[int, ...], width: int
) -> Inputs:
    t, inner = sum(lengths), width + 8
    weights = {
        "w13_E2IL": normal(generator, dtype, EXPERTS, 2 * inner, width, scale=width**-0.5),
        "w2_ELI": normal(generator, dtype, EXPERTS, width, inner, scale=inner**-0.5),
    }
    return {
        "x_TL": normal(generator, dtype, t, width),
        "expert_TR": torch.rand(t, EXPERTS, generator=generator).argsort(1)[:, :ACTIVE],
        "weight_TR": normal(generator, dtype, t, ACTIVE),
        # Narrow weights are what the loop for few tokens reads.
        **{name: w.detach().bfloat16() for name, w in weights.items()},
        "beta": 4.0,
        "linear_beta": 25.0,
    }


def _cuda_serves(inputs: Inputs) -> bool:
    """bf16 has grouped products with gradients."""
    return inputs["x_TL"].dtype == torch.bfloat16 or not torch.is_grad_enabled()


SPEC = Traits(
    make=_make,
    tokens={"x_TL": 0, "expert_TR": 0, "weight_TR": 0},
    widths=(8,),
    full_widths=(256,),
    scaled=("x_TL",),
    serves={
        "cpu": lambda inputs: few_tokens(inputs["x_TL"]),
        "cuda": _cuda_serves,
    },
    batch_invariant={"cpu": MAX_TOKENS},
    graphs=frozenset({"cuda"}),
)
