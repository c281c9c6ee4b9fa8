"""The sigmoid gate for the property checks."""

from __future__ import annotations

import torch

from perilune.kernels.common.cases import normal
from perilune.kernels.registry import Inputs
from perilune.kernels.traits import Traits

HEADS = 3


def _make(
    generator: torch.Generator, dtype: torch.dtype, lengths: tuple[int, ...], width: int
) -> Inputs:
    return {
        "o_THV": normal(generator, dtype, sum(lengths), HEADS, width),
        "gate_TC": normal(generator, dtype, sum(lengths), HEADS * width),
    }


SPEC = Traits(
    make=_make,
    tokens={"o_THV": 0, "gate_TC": 0},
    widths=(5,),
    full_widths=(128,),
    scaled=("o_THV", "gate_TC"),
    batch_invariant={"cuda": 256},
    graphs=frozenset({"cuda"}),
)
