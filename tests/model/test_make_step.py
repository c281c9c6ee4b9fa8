"""What a step is made of, and what it refuses."""

from __future__ import annotations

import re
from itertools import combinations, pairwise

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from perilune.model.chunk_groups import CALL_COST, groups_of
from perilune.model.make_step import Limits, make_step
from perilune.model.step import NO_SLOT, PAGE, Cut, Decoding, Prefilling

CPU = torch.device("cpu")
LIMITS = Limits(CPU, num_slots=8, num_pages=12, window=3)


def test_a_mixed_step() -> None:
    step = make_step(
        LIMITS,
        [Decoding(3, [7, 2], PAGE + 1), Decoding(0, np.array([9, 4, 8], np.int32), 2)],
        [
            Prefilling(5, [1, 6], 62, 4, [Cut(1, 2), Cut(4, 7)], 0),
            Prefilling(1, [11], 0, 2, [Cut(1, 4)]),
        ],
        padded_to=3,
    )
    assert step.decode is not None
    assert step.decode.slot_N.tolist() == [3, 0, NO_SLOT]
    assert step.decode.table_NJ.tolist() == [[7, 2], [9, 0], [0, 0]]
    assert step.decode.length_N.tolist() == [65, 2, 0]
    assert step.decode.keep_N is None
    assert step.row_T.tolist() == [128, 577, 0, 126, 127, 384, 385, 704, 705]
    assert step.logit_R is not None
    assert step.logit_R.tolist() == [0, 1, 2, 8]
    assert (step.num_tokens, step.num_decoded) == (9, 3)
    [chunks] = step.prefill
    assert chunks.packing.lengths == (4, 2)
    assert chunks.keys.lengths == (66, 2)
    assert chunks.slot_M.tolist() == [5, 1]
    assert chunks.new_M is not None
    assert chunks.new_M.tolist() == [False, True]
    assert chunks.key_row_S is not None
    assert chunks.key_row_S.tolist() == [*range(64, 128), 384, 385, 704, 705]
    assert chunks.cuts == ((1, 4), (1,))
    assert chunks.cut_slot_E.tolist() == [2, 7, 4]
    # Inputs older than the chunk come from rows of the windows: 3 a sequence.
    token_I, place_O, carried_O = (x.tolist() for x in chunks.window_cuts)
    assert [token_I[i] for i in (2, 3, 4, 5, 8)] == [0, 1, 2, 3, 4]
    assert place_O == [0, 1, 6, 7]
    assert carried_O == [1, 2, 4, 5]


def test_several_tokens_of_each() -> None:
    step = make_step(LIMITS, [Decoding(3, [7, 2], PAGE + 1)], num_each=3, verify=True, padded_to=2)
    assert step.row_T.tolist() == [7 * PAGE + 62, 7 * PAGE + 63, 2 * PAGE, 0, 0, 0]
    assert step.decode is not None
    assert step.decode.keep_N is not None
    assert step.decode.keep_N.tolist() == [0, 0]


A, B = Decoding(0, [1], 5), Decoding(1, [2], 5)
WRONG = [
    ([], [], "needs a sequence"),
    ([A, A], [], "slot is written by two"),
    ([A], [Prefilling(0, [3], 0, 4)], "slot is written by two"),
    ([A], [Prefilling(1, [3], 0, 4, [Cut(1, 0)])], "slot is written by two"),
    ([], [Prefilling(1, [3], 0, 4, [Cut(1, 1)])], "slot is written by two"),
    ([], [Prefilling(1, [3], 0, 4, [Cut(1, 2), Cut(2, 2)])], "slot is written by two"),
    ([Decoding(8, [1], 5)], [], "slots [8] are not all in 0..7"),
    ([Decoding(-1, [1], 5)], [], "slots [-1] are not all in 0..7"),
    ([], [Prefilling(1, [3], 0, 4, [Cut(1, 9)])], "slots [1, 9] are not all in 0..7"),
    ([Decoding(0, [1], 65)], [], "65 tokens, 1 of them new, on 1 pages"),
    ([Decoding(0, [1], 0)], [], "0 tokens, 1 of them new, on 1 pages"),
    ([Decoding(0, [1, 0], 65)], [], "pages 0..0 are not in 1..11"),
    ([Decoding(0, [12], 5)], [], "pages 12..12 are not in 1..11"),
    ([Decoding(0, [-1], 5)], [], "pages -1..-1 are not in 1..11"),
    ([], [Prefilling(1, [3], 60, 5)], "65 tokens on 1 pages"),
    ([], [Prefilling(1, [3, 0], 64, 5)], "pages 0..3 are not in 1..11"),
    ([], [Prefilling(1, [3], 0, 0)], "0 new tokens after 0"),
    ([], [Prefilling(1, [3], -1, 4)], "4 new tokens after -1"),
    ([], [Prefilling(1, [3], 0, 4, (), 5)], "logits of 5"),
    ([], [Prefilling(1, [3], 0, 4, [Cut(0, 2)])], "cuts after [0] of 4"),
    ([], [Prefilling(1, [3], 0, 4, [Cut(5, 2)])], "cuts after [5] of 4"),
    ([], [Prefilling(1, [3], 0, 4, [Cut(2, 2), Cut(2, 3)])], "cuts after [2, 2] of 4"),
]


@pytest.mark.parametrize(("decoding", "prefilling", "message"), WRONG)
def test_a_step_that_cannot_be_is_refused(decoding, prefilling, message) -> None:
    with pytest.raises(ValueError, match=re.escape(message)):
        make_step(LIMITS, decoding, prefilling)


def cost(groups) -> int:
    tiles = [[-(-s.num_new // 32) for s in group] for group in groups]
    return sum(CALL_COST + len(group) * max(group) for group in tiles)


@given(st.lists(st.integers(1, 300), min_size=1, max_size=6))
def test_groups_of_chunks_are_the_cheapest_there_are(lengths) -> None:
    chunks = [Prefilling(i, [], 0, n) for i, n in enumerate(lengths)]
    groups = groups_of(chunks, CPU)
    assert [s for group in groups for s in group] == chunks
    places = range(1, len(chunks))
    every = [
        [chunks[a:b] for a, b in pairwise((0, *cuts, len(chunks)))]
        for count in range(len(chunks))
        for cuts in combinations(places, count)
    ]
    assert cost(groups) == min(map(cost, every))
    assert groups_of(chunks, torch.device("cuda")) == [chunks]
    assert groups_of([], CPU) == []
