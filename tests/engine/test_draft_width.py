from __future__ import annotations

from perilune.engine.draft_width import FIRST_WIDTH, MAX_PAUSE, MAX_WIDTH, DraftWidth


def test_drafts_that_are_right_grow_up_to_the_maximum() -> None:
    width, seen = DraftWidth(), []
    for _ in range(3):
        seen.append(width.next())
        width.note(seen[-1], seen[-1])
    assert seen == [FIRST_WIDTH, 2 * FIRST_WIDTH, MAX_WIDTH]


def test_a_draft_falls_to_what_was_right_of_it() -> None:
    width = DraftWidth()
    width.note(7, 7)
    width.note(7, 2)
    assert width.next() == 2


def test_a_short_draft_that_was_right_takes_nothing_away() -> None:
    width = DraftWidth()
    width.note(1, 1)
    assert width.next() == FIRST_WIDTH


def test_wrong_drafts_are_followed_by_longer_and_longer_pauses() -> None:
    width, pauses = DraftWidth(), []
    for _ in range(7):
        width.note(1, 0)
        pauses.append(0)
        while width.next() == 0:
            pauses[-1] += 1
    assert pauses == [1, 3, 7, 15, 31, MAX_PAUSE, MAX_PAUSE]
    width.note(1, 1)
    width.note(1, 0)
    assert [width.next() > 0, width.next() > 0] == [False, True]
