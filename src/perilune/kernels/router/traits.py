"""Expert choice and the permutation for the property checks."""

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
        "logits_TE": normal(generator, dtype, sum(lengths), width),
        "bias_E": 0.3 * torch.randn(width, generator=generator, dtype=dtype),
        "num_active": 3,
        "renormalize": True,
        "scale": 2.446,
    }


def _make_pairs(
    generator: torch.Generator, dtype: torch.dtype, lengths: tuple[int, ...], width: int
) -> Inputs:
    scores_TE = torch.rand(sum(lengths), width, generator=generator)
    return {"expert_TR": scores_TE.argsort(1)[:, :3].to(dtype), "num_experts": width}


ROUTER = Traits(
    make=_make,
    tokens={"logits_TE": 0},
    token_outputs={0: 0, 1: 0},
    widths=(8,),
    full_widths=(896,),
    scaled=("logits_TE",),
    serves={"cpu": lambda inputs: few_tokens(inputs["logits_TE"])},
    batch_invariant={"cpu": MAX_TOKENS, "cuda": 256},
    graphs=frozenset({"cuda"}),
)
# A pair's place depends on the other tokens: no row is what it is alone.
PERMUTE = Traits(
    make=_make_pairs,
    token_outputs={1: 0, 2: 0},
    widths=(8,),
    full_widths=(896,),
    graphs=frozenset({"cuda"}),
)
