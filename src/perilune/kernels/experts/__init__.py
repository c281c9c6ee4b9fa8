"""Routed expert MLPs."""

from __future__ import annotations

import torch

from perilune.kernels.common.cases import FP32, normal
from perilune.kernels.registry import Inputs, OpSpec
from perilune.kernels.situ.reference import swi_glu


def _inputs(
    generator: torch.Generator, dtype: torch.dtype, tokens: int, experts: int, *, only: int = 0
) -> Inputs:
    r, width, inner = 2, 6, 10
    pool = only or experts
    order = torch.rand(tokens, pool, generator=generator).argsort(1)[:, : min(r, pool)]
    return {
        "x_TL": normal(generator, dtype, tokens, width),
        "expert_TR": order,
        "weight_TR": normal(generator, dtype, *order.shape),
        "w13_E2IL": normal(generator, dtype, experts, 2 * inner, width),
        "w2_ELI": normal(generator, dtype, experts, width, inner),
        "activation": swi_glu,
    }


SPEC = OpSpec(
    name="experts",
    signature="(x_TL, expert_TR, weight_TR, w13_E2IL, w2_ELI, activation) -> y_TL",
    reference="perilune.kernels.experts.reference:experts",
    oracle="perilune.kernels.experts.oracle:experts",
    backends={"cuda": "perilune.kernels.experts.grouped:experts"},
    cases={
        "spread": lambda g, d: _inputs(g, d, 11, 5),
        "one_token": lambda g, d: _inputs(g, d, 1, 5),
        "one_overloaded": lambda g, d: _inputs(g, d, 11, 5, only=1),
        "single_expert": lambda g, d: _inputs(g, d, 4, 1),
    },
    tolerance=FP32,
)
