"""The matrix product for the property checks."""

from __future__ import annotations

from dataclasses import replace

import torch

from perilune.kernels.common.cases import normal
from perilune.kernels.common.few_tokens import MAX_TOKENS, few_tokens
from perilune.kernels.registry import Inputs
from perilune.kernels.traits import Traits

ROWS = 21


def _make(
    generator: torch.Generator, dtype: torch.dtype, lengths: tuple[int, ...], width: int
) -> Inputs:
    return {
        "x_TI": normal(generator, dtype, sum(lengths), width),
        "weight_OI": normal(generator, dtype, ROWS, width).detach().bfloat16(),
    }


def _with_more_digits(inputs: Inputs) -> Inputs:
    """A weight that bf16 does not hold."""
    return inputs | {"weight_OI": inputs["weight_OI"].float() * (1 + 2**-11)}


SPEC = Traits(
    make=_make,
    tokens={"x_TI": 0},
    widths=(37,),
    full_widths=(2304,),
    scaled=("x_TI", "weight_OI"),
    # The weight of `_make` is bf16, which the loop needs.
    serves={"cpu": lambda inputs: few_tokens(inputs["x_TI"])},
    batch_invariant={"cpu": MAX_TOKENS},
)
SCORES = replace(
    SPEC,
    regimes={"more_digits": _with_more_digits},
    batch_invariant={"cpu": MAX_TOKENS, "cuda": 4096},
    graphs=frozenset({"cuda"}),
)
