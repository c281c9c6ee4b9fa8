"""What the engine refuses, and with which words."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from perilune.core.errors import ConfigError, ContextLengthError, RequestError
from perilune.core.types import EngineInfo, SamplingParams, TokenRequest
from perilune.engine.admission import admit
from perilune.engine.core import EngineCore
from perilune.engine.fake_model import FakeModel

RequestOf = Callable[..., TokenRequest]
NAN, INF = float("nan"), float("inf")


@pytest.mark.parametrize("prompt_len", [100, 101, 5000])
def test_a_prompt_that_does_not_fit_names_both_numbers(
    prompt_len: int, info: EngineInfo, request_of: RequestOf
) -> None:
    with pytest.raises(ContextLengthError, match=f"{prompt_len} tokens.* holds 100,"):
        admit(request_of([1] * prompt_len), info)


@pytest.mark.parametrize(
    ("prompt", "fields", "message"),
    [
        ([], {}, "the prompt is empty"),
        ([1, 64], {}, "prompt holds token id 64; the vocabulary ends at 63"),
        ([-1], {}, "prompt holds token id -1"),
        ([1], {"max_tokens": 0}, "max_tokens must be at least 1, not 0"),
        ([1], {"max_tokens": -5}, "max_tokens must be at least 1, not -5"),
        ([1], {"pin_s": 0.0}, "a pin lasts up to 86400 s, not 0.0"),
        ([1], {"pin_s": 86_401.0}, "a pin lasts up to 86400 s, not 86401.0"),
        ([1], {"pin_s": NAN}, "a pin lasts up to 86400 s, not nan"),
    ],
)
def test_a_bad_request(
    prompt: list[int],
    fields: dict[str, Any],
    message: str,
    info: EngineInfo,
    request_of: RequestOf,
) -> None:
    with pytest.raises(RequestError, match=message):
        admit(request_of(prompt, **fields), info)


@pytest.mark.parametrize(
    "field",
    [
        {"temperature": -0.1},
        {"temperature": NAN},
        {"temperature": INF},
        {"top_p": 1.1},
        {"top_p": NAN},
        {"min_p": -0.5},
        {"top_k": -1},
        {"presence_penalty": NAN},
        {"frequency_penalty": 1e9},
        {"repetition_penalty": 0.0},
        {"logprobs": -1},
        {"logprobs": 65},
        {"logit_bias": {64: 1.0}},
        {"logit_bias": {1: NAN}},
        {"logit_bias": {1: -INF}},
    ],
)
def test_a_bad_sampling_parameter_is_named(
    field: dict[str, Any], info: EngineInfo, request_of: RequestOf
) -> None:
    [name] = field
    with pytest.raises(RequestError, match=name) as refused:
        admit(request_of([1], sampling=SamplingParams(**field)), info)
    assert refused.value.param == name


def test_the_answer_is_cut_to_the_context(info: EngineInfo, request_of: RequestOf) -> None:
    assert admit(request_of([1] * 90, max_tokens=8), info).max_tokens == 8
    assert admit(request_of([1] * 90, max_tokens=11), info).max_tokens == 10
    assert admit(request_of([1] * 99, max_tokens=10**9), info).max_tokens == 1


def test_the_end_tokens_count_unless_ignored(info: EngineInfo, request_of: RequestOf) -> None:
    stops = frozenset({5})
    assert admit(request_of([1], stop_ids=stops), info).stop_ids == stops
    both = admit(request_of([1], stop_ids=stops, ignore_eos=False), info).stop_ids
    assert both == stops | info.eos_ids


@pytest.mark.parametrize("limit", ["max_running", "prefill_budget"])
def test_an_engine_without_room_is_refused(limit: str) -> None:
    with pytest.raises(ConfigError, match=limit):
        EngineCore(FakeModel(), **{limit: 0})
