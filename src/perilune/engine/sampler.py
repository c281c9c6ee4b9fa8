"""Logits to tokens, for all rows of a step at once.

Order: grammars (`masking`), bias and penalties (`sampling_state`), temperature, top-k, top-p, min-p
(`likeliest`), draw.

Legend: B rows, one a sequence; R rows that are drawn; V vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from perilune.core.types import TokenLogprob
from perilune.engine.likeliest import is_filtering, likeliest, removed_tokens
from perilune.engine.masking import mask_forbidden
from perilune.engine.sampling_state import SamplingState

NOT_FINITE = "the model gave logits that are not finite"

_FP32 = torch.finfo(torch.float32)


class Sampled(NamedTuple):
    token_id: int | None
    """None: `fault` says why there is none."""
    logprob: TokenLogprob | None = None
    """Set when the parameters ask for it; taken from the model's own logits, over the tokens that
    the grammar allows, whatever bias, penalties, temperature and filters make of them."""
    fault: str | None = None


@torch.inference_mode()
def sample(
    logits_BV: Tensor, states: Sequence[SamplingState], ahead: Sequence[int] | None = None
) -> list[Sampled]:
    """The next token of every row of fp32 logits. Changes neither logits nor states.

    `ahead`: how many tokens of its sequence come between what `states` know and the row; None: no
    row has any. Only states that do not depend on the output may be ahead.

    Temperature 0 takes the highest shaped logit, the lowest id on a tie. Otherwise the token is
    the first id at which the running sum of the probabilities, in the order of ids, exceeds
    the row's random number: a function of the row, its parameters, its seed and its position.
    """
    logits_BV, faults = mask_forbidden(logits_BV, states)
    shaped_BV = _shaped(logits_BV, states)
    best = shaped_BV.max(dim=-1)  # the first of equal maxima
    token_ids = best.indices.tolist()
    # The maximum is finite exactly when no logit is NaN or +inf and not all are -inf.
    finite = best.values.isfinite().tolist()
    faults = {i: NOT_FINITE for i, is_finite in enumerate(finite) if not is_finite} | faults
    drawn = [i for i, s in enumerate(states) if i not in faults and s.is_drawn]
    if drawn:
        uniforms = [states[i].uniform(0 if ahead is None else ahead[i]) for i in drawn]
        tokens = _draw(shaped_BV, best.values, drawn, states, uniforms)
        for i, token_id in zip(drawn, tokens, strict=True):
            token_ids[i] = token_id
    return [
        Sampled(token_ids[i], _logprob(logits_BV[i], token_ids[i], state.params.logprobs))
        if i not in faults
        else Sampled(None, fault=faults[i])
        for i, state in enumerate(states)
    ]


def take_likeliest(logits_BV: Tensor, token_B: Tensor, told_B: Tensor) -> None:
    """As `sample` for rows that are `SamplingState.is_plain` and not drawn, without a word to the
    host. `told_B` gets -1 where no token could be sampled, and `token_B` some token."""
    best = logits_BV.max(dim=-1)
    token_B.copy_(best.indices)
    told_B.copy_(best.indices.masked_fill(~best.values.isfinite(), -1))


def draw(
    logits_BV: Tensor, temperature_B: Tensor, uniform_B: Tensor, token_B: Tensor, told_B: Tensor
) -> None:
    """Behind `take_likeliest`, for rows of a temperature other than 0, which are plain, too. Both
    are fp64, the temperatures as `temperature_of` has them."""
    best_B = logits_BV.amax(dim=-1)
    is_drawn_B = (temperature_B > 0) & best_B.isfinite()
    divisor_B1 = torch.where(is_drawn_B, temperature_B, 1.0).float()[:, None]
    drawn_B = _first_beyond((logits_BV - best_B[:, None]) / divisor_B1, uniform_B)
    for tokens_B in (token_B, told_B):
        tokens_B.copy_(torch.where(is_drawn_B, drawn_B, tokens_B))


def temperature_of(state: SamplingState) -> float:
    """fp32 cannot hold every positive double; at its ends the result is the limit already."""
    return min(max(state.params.temperature, _FP32.tiny), _FP32.max)


def _shaped(logits_BV: Tensor, states: Sequence[SamplingState]) -> Tensor:
    rows = [i for i, state in enumerate(states) if state.is_shaping]
    if not rows:
        return logits_BV
    shaped_BV = logits_BV.clone()
    for i in rows:
        states[i].shape(shaped_BV[i])
    return shaped_BV


def _draw(
    shaped_BV: Tensor,
    best_B: Tensor,
    rows: list[int],
    states: Sequence[SamplingState],
    uniforms: Sequence[float],
) -> list[int]:
    chosen = [states[i] for i in rows]
    temperatures = [temperature_of(state) for state in chosen]
    device = shaped_BV.device
    if len(rows) < len(states):
        shaped_BV, best_B = shaped_BV[rows], best_B[rows]
    scaled_RV = (shaped_BV - best_B[:, None]) / torch.tensor(temperatures, device=device)[:, None]
    for r, state in enumerate(chosen):
        if is_filtering(state.params):
            scaled_RV[r].masked_fill_(removed_tokens(scaled_RV[r], state.params), -torch.inf)
    uniform_R = torch.tensor(uniforms, dtype=torch.float64, device=device)
    return _first_beyond(scaled_RV, uniform_R).tolist()


def _first_beyond(scaled_RV: Tensor, uniform_R: Tensor) -> Tensor:
    """Tokens [R]. Writes over the logits."""
    # In fp64 the sum of a large vocabulary loses no unlikely token.
    sums_RV = scaled_RV.exp_().cumsum(dim=-1, dtype=torch.float64)
    target_R1 = (uniform_R * sums_RV[:, -1])[:, None]
    return torch.searchsorted(sums_RV, target_R1, right=True)[:, 0]


def _logprob(logits_V: Tensor, token_id: int, num_top: int | None) -> TokenLogprob | None:
    if num_top is None:
        return None
    logprob_V = logits_V.log_softmax(dim=-1)
    chosen = float(logprob_V[token_id])
    if num_top == 0:
        return TokenLogprob(token_id, chosen)
    top_ids = likeliest(logprob_V, num_top)
    return TokenLogprob(
        token_id, chosen, tuple(zip(top_ids.tolist(), logprob_V[top_ids].tolist(), strict=True))
    )
