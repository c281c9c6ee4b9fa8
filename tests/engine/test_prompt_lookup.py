from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from perilune.engine.prompt_lookup import LOOK_BACK, MATCH, PromptLookup


def test_goes_on_as_the_newest_earlier_occurrence_did() -> None:
    lookup = PromptLookup([1, 2, 3, 4, 5, 1, 2, 3, 6, 7, 1, 2, 3])
    assert lookup.draft(4) == [6, 7, 1, 2]


def test_a_run_that_was_never_here_has_no_draft() -> None:
    assert PromptLookup([]).draft(3) == []
    assert PromptLookup([1, 2]).draft(3) == []
    assert PromptLookup([1, 2, 3, 4, 5, 1, 2, 4]).draft(3) == []


def test_a_text_that_repeats_itself_is_continued_in_its_period() -> None:
    assert PromptLookup([9, 1, 2, 1, 2, 1]).draft(6) == [2, 1, 2, 1, 2, 1]
    assert PromptLookup([5, 5, 5, 5]).draft(3) == [5, 5, 5]


def test_of_a_long_prompt_only_the_end_is_looked_through() -> None:
    start = [1, 2, 3, 4]
    filler = [5, 6] * (LOOK_BACK // 2)
    assert PromptLookup([*start, *filler, 1, 2, 3]).draft(1) == []
    assert PromptLookup([*filler, *start, 9, 1, 2, 3]).draft(1) == [4]


@given(st.lists(st.integers(0, 3), max_size=60), st.integers(1, 9))
def test_appending_is_the_same_as_starting_with_all(ids: list[int], count: int) -> None:
    lookup = PromptLookup(ids[: len(ids) // 2])
    for token_id in ids[len(ids) // 2 :]:
        lookup.append(token_id)
    draft = lookup.draft(count)
    assert draft == PromptLookup(ids).draft(count) == _by_search(ids, count)


def _by_search(ids: list[int], count: int) -> list[int]:
    """Without an index."""
    key = ids[-MATCH:]
    for end in range(len(ids) - 1, MATCH - 1, -1):
        if len(key) == MATCH and ids[end - MATCH : end] == key:
            text = [*ids]
            for i in range(count):
                text.append(text[end + i])
            return text[len(ids) :]
    return []
