"""Tokens of blocks: the same key, the same tokens, and nothing else in common."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from perilune.gateway.load.errors import WorkloadError
from perilune.gateway.load.prompts import IdPrompts, TextPrompts
from perilune.gateway.load.workload import Block

keys = st.text("ab01", min_size=1, max_size=4)
prompts = st.lists(st.builds(Block, keys, st.integers(1, 40)), min_size=1, max_size=5)


@given(prompts, st.integers(0, 99))
def test_a_prompt_is_its_blocks_one_after_another(blocks, seed):
    maker = IdPrompts(str(seed), 300, 4000)
    ids = json.loads(maker.json(blocks))
    assert ids == [token for block in blocks for token in maker.ids(block)]
    assert all(300 <= token < 4000 for token in ids)
    assert ids == json.loads(IdPrompts(str(seed), 300, 4000).json(blocks))


@given(keys, st.integers(1, 60), st.integers(1, 60))
def test_a_shorter_block_is_the_start_of_a_longer_one(key, one, other):
    maker = IdPrompts("s")
    short, long = sorted((maker.ids(Block(key, one)), maker.ids(Block(key, other))), key=len)
    assert long[: len(short)] == short


def test_other_keys_and_other_seeds_share_no_first_token_but_by_chance():
    firsts = {tuple(IdPrompts(s).ids(Block(k, 8))) for s in ("1", "2") for k in ("b1", "b2", "r1")}
    assert len(firsts) == 6


@given(prompts)
def test_text_has_a_word_for_each_token(blocks):
    text = json.loads(TextPrompts("s").json(blocks))
    assert len(text.split()) == sum(block.num_tokens for block in blocks)
    first = json.loads(TextPrompts("s").json(blocks[:1]))
    assert text.startswith(first)


@pytest.mark.parametrize(("first", "end"), [(5, 5), (9, 3), (-1, 4)])
def test_a_range_without_ids_is_refused(first, end):
    with pytest.raises(WorkloadError, match="no token id"):
        IdPrompts("s", first, end)
