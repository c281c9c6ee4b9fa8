"""The short convolution for the property checks."""

from __future__ import annotations

import torch

from perilune.kernels.common.cases import normal
from perilune.kernels.common.packing import Packing
from perilune.kernels.registry import Inputs
from perilune.kernels.traits import OneToken, Traits

TAPS = 4


def _make(
    generator: torch.Generator, dtype: torch.dtype, lengths: tuple[int, ...], width: int
) -> Inputs:
    return {
        "x_TC": normal(generator, dtype, sum(lengths), width),
        "weight_CW": normal(generator, dtype, width, TAPS),
        "packing": Packing.of(lengths),
        "window_NWC": normal(generator, dtype, len(lengths), TAPS - 1, width),
    }


def _one_token(inputs: Inputs) -> Inputs:
    step = {name: inputs[name] for name in ("weight_CW", "window_NWC")}
    return {"x_NC": inputs["x_TC"], **step}


CONV = Traits(
    make=_make,
    tokens={"x_TC": 0},
    sequences={"window_NWC": 0},
    state_outputs={"window_NWC": 1},
    packing="packing",
    widths=(6,),
    full_widths=(1536,),
    scaled=("x_TC",),
    one_token=OneToken(
        "perilune.kernels.causal_conv.reference:causal_conv_decode", ("window_NWC",), _one_token
    ),
    batch_invariant={"cuda": 256},
    graphs=frozenset({"cuda"}),
)
