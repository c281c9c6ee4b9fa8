"""RMS norms for the property checks."""

from __future__ import annotations

import torch

from perilune.kernels.common.cases import normal
from perilune.kernels.common.few_tokens import MAX_TOKENS, few_tokens
from perilune.kernels.registry import Inputs
from perilune.kernels.traits import Traits

HEADS = 2


def _make(
    generator: torch.Generator, dtype: torch.dtype, lengths: tuple[int, ...], width: int
) -> Inputs:
    return {
        "x_D": normal(generator, dtype, sum(lengths), width),
        "weight_D": normal(generator, dtype, width),
        "eps": 1e-5,
    }


def _make_gated(
    generator: torch.Generator, dtype: torch.dtype, lengths: tuple[int, ...], width: int
) -> Inputs:
    return {
        "x_D": normal(generator, dtype, sum(lengths), HEADS, width),
        "gate_D": normal(generator, dtype, sum(lengths), HEADS, width),
        "weight_D": normal(generator, dtype, width),
        "eps": 1e-5,
    }


def _cpu_serves(inputs: Inputs) -> bool:
    return few_tokens(inputs["x_D"])


RMS_NORM = Traits(
    make=_make,
    tokens={"x_D": 0},
    widths=(7,),
    full_widths=(2304,),
    scaled=("x_D",),
    serves={"cpu": _cpu_serves},
    batch_invariant={"cpu": MAX_TOKENS, "cuda": 256},
    graphs=frozenset({"cuda"}),
)
GATED_RMS_NORM = Traits(
    make=_make_gated,
    tokens={"x_D": 0, "gate_D": 0},
    widths=(9,),
    full_widths=(128,),
    scaled=("x_D", "gate_D"),
    serves={"cpu": _cpu_serves},
    batch_invariant={"cpu": MAX_TOKENS, "cuda": 256},
    graphs=frozenset({"cuda"}),
)
