"""Stop strings and log-probabilities on the way out."""

from __future__ import annotations

from collections.abc import Sequence

from hypothesis import example, given
from hypothesis import strategies as st

from perilune.core.types import TextLogprob
from perilune.gateway.backends.shown_text import ShownText

PIECES = st.lists(st.text("ab", max_size=3), max_size=8)
PIECES_AND_CALLS = st.lists(st.none() | st.text("ab", max_size=3), max_size=8)
STOPS = st.lists(st.text("ab", min_size=1, max_size=3), max_size=2)


def show(pieces: Sequence[str | None], stops: list[str]):
    """None is a tool call, which completes the text before it."""
    shown = ShownText(stops)
    deltas = []
    for piece in pieces:
        if shown.stopped:
            break
        if piece is None:
            deltas += shown.finish()
            continue
        token = TextLogprob(token=piece, token_bytes=piece.encode(), logprob=-1.0)
        deltas += shown.feed(piece, [token])
    deltas += shown.finish()
    return shown, deltas


@given(PIECES, STOPS)
def test_the_text_ends_before_the_first_stop_string(pieces, stops):
    whole = "".join(pieces)
    ends = [whole.find(stop) + len(stop) for stop in stops if stop in whole]
    shown, deltas = show(pieces, stops)
    text = "".join(delta.text for delta in deltas)
    assert shown.stopped == bool(ends)
    assert whole.startswith(text)
    if ends:
        assert any(whole[: min(ends)] == text + stop for stop in stops)
    else:
        assert text == whole


@given(PIECES_AND_CALLS, STOPS)
@example(["abb", "b"], ["bba"])
@example(["a", "b", None, None], ["ba"])
@example(["a", "b", None, "a"], ["ba"])
def test_log_probabilities_come_with_their_text(pieces, stops):
    """At every moment they cover the shown text, and reach no further than its last token."""
    _, deltas = show(pieces, stops)
    num_shown = num_covered = last_begins = 0
    for delta in deltas:
        num_shown += len(delta.text)
        for item in delta.logprobs:
            if item.token:
                last_begins = num_covered
            num_covered += len(item.token)
        assert num_shown <= num_covered
        assert last_begins < num_shown or not num_covered


@given(PIECES)
def test_without_stop_strings_nothing_is_held_back(pieces):
    _, deltas = show(pieces, [])
    assert [delta.text for delta in deltas] == [piece for piece in pieces if piece] or "" in pieces
    assert sum(len(delta.logprobs) for delta in deltas) == len(pieces)
