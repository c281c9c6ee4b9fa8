from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from perilune.text.errors import TextError
from perilune.text.stop import StopStrings


def run(stops: list[str], pieces: list[str]) -> tuple[str, str | None]:
    """All text shown, and the stop string."""
    filter_ = StopStrings(stops)
    results = [filter_.feed(piece) for piece in pieces]
    shown = "".join(result.text for result in results)
    matched = results[-1].matched if results else None
    return (shown, matched) if matched else (shown + filter_.flush(), None)


def by_hand(stops: list[str], text: str) -> tuple[str, str | None]:
    for end in range(1, len(text) + 1):
        complete = [stop for stop in stops if text[:end].endswith(stop)]
        if complete:
            longest = max(complete, key=len)
            return text[: end - len(longest)], longest
    return text, None


@settings(max_examples=400, deadline=None)
@given(
    st.lists(st.text("ab", min_size=1, max_size=4), max_size=3),
    st.lists(st.text("abc", max_size=5), max_size=8),
)
def test_any_split_gives_the_first_complete_match(stops: list[str], pieces: list[str]) -> None:
    assert run(stops, pieces) == by_hand(stops, "".join(pieces))


def test_only_a_possible_beginning_is_held_back() -> None:
    stops = StopStrings(["\n\nHuman:", "END"])
    assert stops.feed("one\n").text == "one"
    assert stops.feed("two E").text == "\ntwo "
    assert stops.feed("X").text == "EX"
    assert stops.feed("EN").text == ""
    assert stops.feed("D and more") == ("", "END")
    assert stops.feed("never") == ("", "END")


def test_text_before_the_match_is_shown() -> None:
    assert StopStrings(["stop"]).feed("go on, stop here") == ("go on, ", "stop")


def test_a_match_may_begin_inside_a_failed_one() -> None:
    assert run(["aab"], ["a", "a", "a", "b"]) == ("a", "aab")


def test_held_text_comes_out_at_the_end() -> None:
    stops = StopStrings(["stop"])
    assert stops.feed("a sto").text == "a "
    assert stops.flush() == "sto"
    assert stops.feed("p").matched is None


def test_an_empty_stop_string_is_refused() -> None:
    with pytest.raises(TextError, match="empty"):
        StopStrings(["a", ""])


def test_a_long_stop_string_costs_linear_time() -> None:
    stop = "a" * 20_000 + "b"
    assert run([stop], ["a"] * 60_000)[0] == "a" * 60_000
