"""Routed experts from MXFP4 for the property checks."""

from __future__ import annotations

import torch

from perilune.kernels.common.cases import normal
from perilune.kernels.experts import packed
from perilune.kernels.experts.tiles import tiled
from perilune.kernels.registry import Inputs
from perilune.kernels.traits import Traits

EXPERTS, ACTIVE = 5, 2


def _make(
    generator: torch.Generator, dtype: torch.dtype, lengths: tuple[int, ...], width: int
) -> Inputs:
    t, inner = sum(lengths), width + 32
    # A code is 2.8 in size: the weights have a deviation of about the inverse root of the width.
    top = 126 - round(width**0.5).bit_length()
    scales = (top - 1, top)
    return {
        "x_TL": normal(generator, dtype, t, width),
        "expert_TR": torch.rand(t, EXPERTS, generator=generator).argsort(1)[:, :ACTIVE],
        "weight_TR": normal(generator, dtype, t, ACTIVE),
        "w13_EMKW": tiled(packed(generator, EXPERTS, 2 * inner, width, scales), gated=True),
        "w2_EMKW": tiled(packed(generator, EXPERTS, width, inner, scales), gated=False),
        "wide": False,
        "beta": 4.0,
        "linear_beta": 25.0,
    }


def _cuda_serves(inputs: Inputs) -> bool:
    return not (torch.is_grad_enabled() and inputs["x_TL"].requires_grad)


SPEC = Traits(
    make=_make,
    tokens={"x_TL": 0, "expert_TR": 0, "weight_TR": 0},
    widths=(32,),
    full_widths=(256,),
    scaled=("x_TL",),
    serves={"cuda": _cuda_serves},
    graphs=frozenset({"cuda"}),
)
