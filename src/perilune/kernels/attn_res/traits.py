"""Attention over residual sources for the property checks."""

from __future__ import annotations

import torch

from perilune.kernels.common.cases import normal
from perilune.kernels.common.few_tokens import MAX_TOKENS, few_tokens
from perilune.kernels.registry import Inputs
from perilune.kernels.traits import Traits

SOURCES = 5


def _make(
    generator: torch.Generator, dtype: torch.dtype, lengths: tuple[int, ...], width: int
) -> Inputs:
    return {
        "sources_NTD": normal(generator, dtype, SOURCES, sum(lengths), width),
        "query_D": normal(generator, dtype, width),
        "eps": 1e-5,
    }


SPEC = Traits(
    make=_make,
    tokens={"sources_NTD": 1},
    widths=(17,),
    full_widths=(2304,),
    scaled=("sources_NTD",),
    serves={"cpu": lambda inputs: few_tokens(inputs["sources_NTD"][0])},
    batch_invariant={"cpu": MAX_TOKENS, "cuda": 256},
    graphs=frozenset({"cuda"}),
)
