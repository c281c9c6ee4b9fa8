"""Ideal hit rates against plain models of the same caches."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from perilune.gateway.load.prefix_oracle import ideal_hits
from perilune.gateway.load.workload import Block

Tokens = tuple[tuple[str, int], ...]
"""A prompt as its tokens, each named by its block and place."""


def tokens_of(prompt: Sequence[Block]) -> Tokens:
    return tuple((block.key, place) for block in prompt for place in range(block.num_tokens))


def hits(prompts, capacity=None) -> dict[str, int]:
    return {found.policy: found.hit_tokens for found in ideal_hits(prompts, capacity)}


def common(one: Tokens, other: Tokens) -> int:
    length = 0
    while length < min(len(one), len(other)) and one[length] == other[length]:
        length += 1
    return length


@st.composite
def conversations(draw, num_tokens: int = 3, max_prompts: int = 8):
    """Prompts of whole blocks, all but the last of one size."""
    prompts = []
    for _ in range(draw(st.integers(1, max_prompts))):
        keys = draw(st.lists(st.sampled_from("abc"), max_size=3))
        last = Block(draw(st.sampled_from("abcde")), draw(st.integers(1, num_tokens)))
        prompts.append([*(Block(key, num_tokens) for key in keys), last])
    return prompts


@given(conversations())
def test_without_end_a_hit_is_the_longest_common_prefix_with_any_prompt_before(prompts):
    expected = 0
    for number, prompt in enumerate(prompts):
        tokens = tokens_of(prompt)
        best = max((common(tokens, tokens_of(p)) for p in prompts[:number]), default=0)
        expected += min(best, len(tokens) - 1)
    assert hits(prompts)["infinite"] == expected


@given(conversations(), st.integers(1, 30))
def test_policies_keep_their_order(prompts, capacity):
    found = hits(prompts, capacity)
    assert found["lru"] <= found["infinite"]
    assert found["belady"] <= found["infinite"]
    total = sum(block.num_tokens for prompt in prompts for block in prompt)
    assert hits(prompts, total) == dict.fromkeys(("infinite", "lru", "belady"), found["infinite"])


def blocks(*lengths: str) -> list[Block]:
    return [Block(each[0], int(each[1:])) for each in lengths]


ENDS_IN_A_BLOCK = [
    *(blocks("b3", "b3", "a1"), blocks("a2"), blocks("b3", "b1"), blocks("c1")),
    *(blocks("a1"), blocks("a1"), blocks("a3", "a1")),
]


@example(ENDS_IN_A_BLOCK, 7)
@given(conversations(), st.integers(1, 12))
def test_lru_is_that_of_single_tokens(prompts, capacity):
    """A token of the prompt tree: used with every prompt that has it, the deepest going first."""
    last_use: dict[Tokens, int] = {}
    expected = 0
    for now, prompt in enumerate(prompts):
        tokens = tokens_of(prompt)
        prefixes = [tokens[: end + 1] for end in range(len(tokens))]
        matched = 0
        while matched < len(prefixes) and prefixes[matched] in last_use:
            matched += 1
        expected += min(matched, len(tokens) - 1)
        last_use.update(dict.fromkeys(prefixes, now))
        # Of one prompt the deepest goes first, and its blocks stay in one piece as long as any.
        order = sorted(last_use, key=lambda prefix: (-last_use[prefix], len(prefix)))
        last_use = {prefix: last_use[prefix] for prefix in order[:capacity]}
    assert hits(prompts, capacity)["lru"] == expected


@settings(max_examples=60)
@given(conversations(num_tokens=1, max_prompts=6), st.integers(1, 4))
def test_no_choice_of_what_to_keep_beats_belady(prompts, capacity):
    """Single-token blocks, so that every cache of so many prefixes can be tried."""
    paths = [[tokens_of(p)[: end + 1] for end in range(len(p))] for p in prompts]

    @lru_cache(None)
    def best(number: int, held: frozenset[Tokens]) -> int:
        if number == len(paths):
            return 0
        path = paths[number]
        matched = 0
        while matched < len(path) and path[matched] in held:
            matched += 1
        return matched + max(best(number + 1, kept) for kept in subsets(held | set(path), capacity))

    @lru_cache(None)
    def subsets(items: frozenset[Tokens], size: int) -> tuple[frozenset[Tokens], ...]:
        found = {frozenset[Tokens]()}
        for item in sorted(items, key=len):
            found |= {
                kept | {item}
                for kept in found
                if len(kept) < size and (len(item) == 1 or item[:-1] in kept)
            }
        return tuple(found)

    # The oracle always leaves one token of a prompt to compute: one that no other prompt has.
    longer = [[*prompt, Block(f"end{number}", 1)] for number, prompt in enumerate(prompts)]
    assert hits(longer, capacity)["belady"] == best(0, frozenset())


def test_the_whole_prompt_is_never_a_hit():
    prompt = [Block("a", 10)]
    assert hits([prompt, prompt])["infinite"] == 9


def test_the_rate_and_the_capacity_are_told():
    infinite, lru, belady = ideal_hits([[Block("a", 4)], [Block("a", 4), Block("b", 4)]], 100)
    assert infinite.capacity_tokens is None
    assert lru.capacity_tokens == belady.capacity_tokens == 100
    assert infinite.rate == pytest.approx(4 / 12)
    assert ideal_hits([], 5)[0].rate == 0.0
