"""Attention over residual sources for the property checks."""

from __future__ import annotations

import torch

from perilune.kernels.common.cases import normal
from perilune.kernels.common.few_tokens import MAX_TOKENS, few_tokens
from perilune.kernels.registry import Inputs
from perilune.kernels.traits import Traits

BLOCKS = 4
QUERY_SIZE = 4.0
"""Scores differ by a few: with a query of N(0, 1) a wide source would take all, and every gradient
that goes through a share would be rounding."""


def _make(
    generator: torch.Generator, dtype: torch.dtype, lengths: tuple[int, ...], width: int
) -> Inputs:
    tokens = sum(lengths)
    return {
        "partial_TD": normal(generator, dtype, tokens, width),
        "blocks_NTD": normal(generator, dtype, BLOCKS, tokens, width),
        "query_D": normal(generator, dtype, width, scale=QUERY_SIZE * width**-0.5),
        "eps": 1e-5,
        "update_TD": normal(generator, dtype, tokens, width),
        "weight_D": normal(generator, dtype, width),
        "norm_eps": 1e-6,
    }


SPEC = Traits(
    make=_make,
    tokens={"partial_TD": 0, "blocks_NTD": 1, "update_TD": 0},
    token_outputs={0: 0, 1: 0},
    widths=(17,),
    full_widths=(2304,),
    scaled=("partial_TD", "blocks_NTD", "update_TD"),
    serves={"cpu": lambda inputs: few_tokens(inputs["partial_TD"])},
    batch_invariant={"cpu": MAX_TOKENS, "cuda": 256},
    graphs=frozenset({"cuda"}),
)
