"""Sampling fields of the wire into SamplingParams."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Mapping
from typing import Any, TypeVar

from perilune.core.types import ChatRequest, CompletionRequest, SamplingParams
from perilune.gateway.errors import BodyError
from perilune.gateway.request_types import SamplingBody

R = TypeVar("R", ChatRequest, CompletionRequest)

_MAX_SEED = 2**63 - 1
_TOKEN_ID = re.compile("0|[1-9][0-9]{0,8}")
"""With leading zeros two keys would mean one token."""
_SAME_NAME = (
    "temperature",
    "top_p",
    "min_p",
    "presence_penalty",
    "frequency_penalty",
    "repetition_penalty",
)


def to_sampling(wire: SamplingBody, num_logprobs: int | None) -> SamplingParams:
    """Only what the client gave; the defaults stand in one place, on SamplingParams."""
    given: dict[str, Any] = {
        name: value for name in _SAME_NAME if (value := getattr(wire, name)) is not None
    }
    return SamplingParams(
        top_k=max(0, wire.top_k or 0),
        seed=None if wire.seed is None else wire.seed & _MAX_SEED,
        logit_bias=_to_logit_bias(wire.logit_bias or {}),
        logprobs=num_logprobs,
        **given,
    )


def to_stop(wire: SamplingBody) -> tuple[str, ...]:
    return (wire.stop,) if isinstance(wire.stop, str) else tuple(wire.stop or ())


def for_choice(request: R, index: int) -> R:
    """The request of choice `index`: a given seed is moved on by `index`."""
    seed = request.sampling.seed
    if seed is not None:
        seed = (seed + index) & _MAX_SEED
    return dataclasses.replace(request, sampling=dataclasses.replace(request.sampling, seed=seed))


def _to_logit_bias(bias: Mapping[str, float]) -> dict[int, float]:
    for key in bias:
        if not _TOKEN_ID.fullmatch(key):
            raise BodyError(f"logit_bias: {key[:40]!r} is not a token id", param="logit_bias")
    return {int(key): value for key, value in bias.items()}
