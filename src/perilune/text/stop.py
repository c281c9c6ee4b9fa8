"""Stop strings in a stream of text, wherever the pieces are split."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from perilune.text.errors import TextError


class StopResult(NamedTuple):
    text: str
    """What may be shown now."""
    matched: str | None
    """The stop string that ended the text; nothing comes after it."""


class StopStrings:
    """Passes text on up to the first stop string; holds back only what could become one.

    The first match to be complete wins, the longer one where two are complete at once: this, and
    so the output, does not depend on how the text is split.
    """

    def __init__(self, stops: Sequence[str]) -> None:
        """Raises TextError if a stop string is empty."""
        self._matchers = [_Matcher(stop) for stop in stops]
        self._held = ""
        self._matched: str | None = None

    def feed(self, text: str) -> StopResult:
        if self._matched is not None:
            return StopResult("", self._matched)
        pending = self._held + text
        for end, char in enumerate(text, start=len(self._held) + 1):
            complete = [matcher.stop for matcher in self._matchers if matcher.advance(char)]
            if complete:
                self._matched = max(complete, key=len)
                self._held = ""
                return StopResult(pending[: end - len(self._matched)], self._matched)
        num_held = max((matcher.num_matched for matcher in self._matchers), default=0)
        self._held = pending[len(pending) - num_held :]
        return StopResult(pending[: len(pending) - num_held], None)

    def flush(self) -> str:
        """The text held back, at the end of a stream without a match."""
        held, self._held = self._held, ""
        for matcher in self._matchers:
            matcher.num_matched = 0
        return held


class _Matcher:
    """Knuth, Morris and Pratt: how much of one stop string the text now ends with."""

    def __init__(self, stop: str) -> None:
        if not stop:
            raise TextError("a stop string is empty", param="stop")
        self.stop = stop
        self.num_matched = 0
        self._fallback = _border_lengths(stop)

    def advance(self, char: str) -> bool:
        """Takes one character; True if the stop string is now complete."""
        if self.num_matched == len(self.stop):
            self.num_matched = self._fallback[-1]
        while self.num_matched and self.stop[self.num_matched] != char:
            self.num_matched = self._fallback[self.num_matched - 1]
        if self.stop[self.num_matched] == char:
            self.num_matched += 1
        return self.num_matched == len(self.stop)


def _border_lengths(stop: str) -> list[int]:
    """For each prefix, the length of its longest proper prefix that is also its suffix."""
    borders = [0]
    for char in stop[1:]:
        length = borders[-1]
        while length and stop[length] != char:
            length = borders[length - 1]
        borders.append(length + (stop[length] == char))
    return borders
