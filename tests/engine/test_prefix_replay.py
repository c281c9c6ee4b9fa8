"""Prompts of a trace through the prefix cache."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from perilune.core.errors import ConfigError
from perilune.engine.cost_model import CostModel
from perilune.engine.prefix_replay import Replayed, replay
from perilune.engine.retention import Retention

P = 4
COST = CostModel(token_flops=1.0, pair_flops=0.0, row_bytes=1, state_bytes=16)


def run(prompts, *, num_bytes=100_000, share=0.5, alpha=0.15, **retention) -> Replayed:
    return replay(
        [np.asarray(tokens, np.int32) for tokens in prompts],
        COST,
        num_bytes=num_bytes,
        state_share=share,
        retention=Retention(**retention),
        alpha=alpha,
        page_len=P,
    )


def test_a_chat_of_50_turns_computes_only_what_is_new():
    tokens = np.random.default_rng(0).integers(0, 1000, 50 * 37)
    turns = [tokens[: 37 * (turn + 1)] for turn in range(50)]
    got = run(turns)
    # The last token of every prompt is computed once more, for its logits.
    assert got.prompt_tokens - got.hit_tokens == 50 * 37 + 49
    assert got.written_tokens == 50 * 37 - 1


def test_a_repeated_prompt_computes_one_token():
    assert run([range(100)] * 3).hit_tokens == 2 * 99


def test_a_branch_is_hit_at_its_third_sighting():
    """At the second one a state is kept there."""
    prompts = [[*range(50), *range(start, start + 20)] for start in (100, 200, 300)]
    assert run(prompts).hit_tokens == 50
    assert run(prompts, interval=10).hit_tokens == 100


def test_a_grid_finds_what_goes_on_a_little_before_the_end():
    prompts = [[*range(70), 900, 901], [*range(70), *range(200, 230)]]
    assert run(prompts).hit_tokens == 0
    assert run(prompts, align=16).hit_tokens == 64


def test_what_is_used_outlasts_what_is_not():
    """Room for three prompts; one of them comes back again and again, the others never do."""
    prompts = []
    for start in range(1000, 20_000, 1000):
        prompts += [[*range(200)], [*range(start, start + 200)]]
    got = run(prompts, num_bytes=1200, share=0.45, max_cuts=2)
    assert got.hit_tokens == (len(prompts) // 2 - 1) * 199


def test_a_prompt_that_does_not_fit_is_no_hit():
    got = run([range(1000), range(10), range(11)], num_bytes=800, share=0.5)
    assert (got.num_too_long, got.hit_tokens, got.prompt_tokens) == (1, 9, 1021)
    assert got.rate == 9 / 1021


@pytest.mark.parametrize(("num_bytes", "share"), [(100, 0.5), (1000, 0.999), (1000, 0.01)])
def test_a_capacity_that_serves_nobody_is_refused(num_bytes, share):
    with pytest.raises(ConfigError, match="a prompt needs pages and up to 10 slots"):
        run([range(10)], num_bytes=num_bytes, share=share)


PROMPTS = st.lists(st.lists(st.integers(0, 2), min_size=1, max_size=6), min_size=1, max_size=8)


def endless_hits(prompts: list[list[int]]) -> int:
    """Of a cache that keeps every state for ever."""
    seen: set[tuple[int, ...]] = {()}
    hits = 0
    for tokens in prompts:
        hits += max(n for n in range(len(tokens)) if tuple(tokens[:n]) in seen)
        seen |= {tuple(tokens[:n]) for n in range(len(tokens))}
    return hits


@given(PROMPTS)
@settings(max_examples=100, deadline=None)
def test_with_room_and_a_state_at_every_token_nothing_is_missed(prompts):
    assert run(prompts, interval=1, max_cuts=30).hit_tokens == endless_hits(prompts)


@given(PROMPTS, st.integers(0, 5), st.integers(220, 400))
@settings(max_examples=100, deadline=None)
def test_no_hit_is_invented(prompts, interval, num_bytes):
    got = run(prompts, num_bytes=num_bytes, share=0.8, interval=interval)
    assert got.hit_tokens <= endless_hits(prompts)
