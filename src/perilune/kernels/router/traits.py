"""Expert choice and the permutation for the property checks."""

from __future__ import annotations

import torch

from perilune.kernels.common.cases import normal
from perilune.kernels.common.few_tokens import MAX_TOKENS, few_tokens
from perilune.kernels.registry import Inputs
from perilune.kernels.router.tally import grid
from perilune.kernels.traits import Traits

ACTIVE = 3
BINS = 21
"""Odd, so that r = 0, where many lie when all biases are one, is in the middle of a bin."""
COUNTED = (133, 896)
"""Numbers of experts with which choices are counted. Others are not: counting asks for the
reference on a CPU."""
APART = 1e-4
"""Of a bin, and of a score: what fp32 and the truth in fp64 must not decide differently."""


def _make(
    generator: torch.Generator, dtype: torch.dtype, lengths: tuple[int, ...], width: int
) -> Inputs:
    inputs: Inputs = {
        "logits_TE": normal(generator, dtype, sum(lengths), width),
        "bias_E": 0.3 * torch.randn(width, generator=generator, dtype=dtype),
        "num_active": ACTIVE,
        "renormalize": True,
        "scale": 2.446,
        "count_EB": None,
        "load_E": None,
        "is_counted_T": None,
    }
    if width not in COUNTED:
        return inputs
    whole = {"generator": generator, "dtype": torch.int32}
    counters = {
        "count_EB": torch.randint(9, (width, BINS), **whole),
        "load_E": torch.randint(9, (width,), **whole),
        "is_counted_T": torch.rand(sum(lengths), generator=generator) < 0.8,
    }
    return _decided(inputs | counters)


def _decided(inputs: Inputs) -> Inputs:
    """With other tokens in place of those of which a rounding decides."""
    logits_TE = inputs["logits_TE"].detach()
    bias_E = inputs["bias_E"].double()
    score_TE = torch.sigmoid(logits_TE.double())
    best_TE = (score_TE + bias_E).sort(-1, descending=True).values[:, : ACTIVE + 1]
    low, width = grid(bias_E, BINS)
    place_TE = (best_TE[:, ACTIVE, None] - score_TE - low) / width
    is_inside_T = ((place_TE - place_TE.round()).abs() > APART).all(-1)
    is_apart_T = (best_TE.diff(dim=-1).abs() > 1e-2 * APART).all(-1)
    decided_T = (is_inside_T & is_apart_T).nonzero()[:, 0]
    if len(decided_T) == 0:
        return inputs
    # Each token, or the next one that is decided.
    at_T = torch.arange(len(logits_TE))
    next_T = torch.searchsorted(decided_T, at_T).clamp(max=len(decided_T) - 1)
    return inputs | {"logits_TE": logits_TE[decided_T[next_T]].requires_grad_()}


def _scaled(inputs: Inputs, factor: float) -> Inputs:
    logits_TE = (factor * inputs["logits_TE"].detach()).requires_grad_()
    scaled = inputs | {"logits_TE": logits_TE}
    return scaled if inputs["count_EB"] is None else _decided(scaled)


def _make_pairs(
    generator: torch.Generator, dtype: torch.dtype, lengths: tuple[int, ...], width: int
) -> Inputs:
    scores_TE = torch.rand(sum(lengths), width, generator=generator)
    return {"expert_TR": scores_TE.argsort(1)[:, :3].to(dtype), "num_experts": width}


ROUTER = Traits(
    make=_make,
    tokens={"logits_TE": 0},
    sequences={"is_counted_T": 0},
    token_outputs={0: 0, 1: 0},
    counters=("count_EB", "load_E"),
    widths=(8, 133),
    full_widths=(256, 896),
    regimes={
        "logits_of_a_hundredth": lambda inputs: _scaled(inputs, 0.01),
        "logits_of_eight": lambda inputs: _scaled(inputs, 8.0),
    },
    serves={"cpu": lambda inputs: inputs["count_EB"] is None and few_tokens(inputs["logits_TE"])},
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
