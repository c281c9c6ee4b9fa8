"""SiTU-GLU for the property checks."""

from __future__ import annotations

import torch

from perilune.kernels.common.cases import normal
from perilune.kernels.common.few_tokens import MAX_TOKENS, few_tokens
from perilune.kernels.registry import Inputs
from perilune.kernels.traits import Traits


def _make(
    generator: torch.Generator, dtype: torch.dtype, lengths: tuple[int, ...], width: int
) -> Inputs:
    return {
        "gate_up_2I": normal(generator, dtype, sum(lengths), 2 * width),
        "beta": 4.0,
        "linear_beta": 25.0,
    }


SPEC = Traits(
    make=_make,
    tokens={"gate_up_2I": 0},
    widths=(5,),
    full_widths=(3072,),
    scaled=("gate_up_2I",),
    serves={"cpu": lambda inputs: few_tokens(inputs["gate_up_2I"])},
    batch_invariant={"cpu": MAX_TOKENS, "cuda": 256},
    graphs=frozenset({"cuda"}),
)
