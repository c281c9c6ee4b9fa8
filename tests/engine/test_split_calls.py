"""Which chunks share a model call."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from perilune.core.types import EngineInfo, TokenRequest
from perilune.engine.admission import admit
from perilune.engine.batch import CALL_COST, Chunk, split_calls
from perilune.engine.fake_model import FakeCache

INFO = EngineInfo(model_id="", vocab_size=2, max_context=1000, eos_ids=frozenset())


def chunk_of(length: int) -> Chunk:
    request = TokenRequest(request_id="", prompt_ids=(1,) * length, max_tokens=1)
    return Chunk(admit(request, INFO), [1] * length, FakeCache(), is_sampled=True, is_prompt=True)


def lengths_of(calls: Sequence[Sequence[Chunk]]) -> list[list[int]]:
    return [[len(chunk.token_ids) for chunk in call] for call in calls]


def least_cost(lengths: Sequence[int]) -> int:
    """Over every way to cut the sorted lengths."""
    if not lengths:
        return 0
    return min(
        CALL_COST + end * lengths[0] + least_cost(lengths[end:])
        for end in range(1, len(lengths) + 1)
    )


@pytest.mark.parametrize(
    ("lengths", "calls"),
    [
        ([], []),
        ([1, 1, 1], [[1, 1, 1]]),
        ([1, 200, 1], [[1, 1], [200]]),
        ([16] * 8 + [256], [[256], [16] * 8]),
        ([20, 30, 25], [[30, 25, 20]]),
    ],
)
def test_like_goes_with_like(lengths: list[int], calls: list[list[int]]) -> None:
    assert lengths_of(split_calls([chunk_of(n) for n in lengths])) == calls


@given(st.lists(st.integers(1, 300), max_size=9))
def test_no_other_cut_is_cheaper(lengths: list[int]) -> None:
    calls = lengths_of(split_calls([chunk_of(n) for n in lengths]))
    assert sorted(n for call in calls for n in call) == sorted(lengths)
    padded = [call for call in calls if max(call) > 1]
    cost = sum(CALL_COST + len(call) * max(call) for call in padded)
    assert cost == least_cost(sorted((n for n in lengths if n > 1), reverse=True))
