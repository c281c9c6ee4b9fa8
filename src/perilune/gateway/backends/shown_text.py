"""Answer text on its way out: cut at a stop string, each log-probability with its text."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

from perilune.core.types import TextDelta, TextLogprob
from perilune.text.stop import StopStrings


class ShownText:
    """Holds back what may become a stop string, and the log-probabilities of what is held back."""

    def __init__(self, stops: Sequence[str]) -> None:
        self.stopped = False
        """A stop string came; there is no more text."""
        self._stops = StopStrings(stops)
        self._num_fed = 0
        self._num_shown = 0
        self._waiting: deque[tuple[int, TextLogprob]] = deque()
        """(characters before the token, its log-probability)"""

    def feed(self, text: str, logprobs: Sequence[TextLogprob]) -> list[TextDelta]:
        """At most one delta: the text that is certain now."""
        self._waiting.extend((self._num_fed, logprob) for logprob in logprobs)
        self._num_fed += len(text)
        result = self._stops.feed(text)
        self.stopped = result.matched is not None
        self._num_shown += len(result.text)
        shown: list[TextLogprob] = []
        while self._waiting and self._waiting[0][0] < self._num_shown:
            shown.append(self._waiting.popleft()[1])
        return _delta(result.text, shown)

    def finish(self) -> list[TextDelta]:
        """What was held back, where the text is complete: at the end of an answer, and before each
        tool call. Nothing after a stop string."""
        if self.stopped:
            return []
        shown = [logprob for _, logprob in self._waiting]
        self._waiting.clear()
        self._num_shown = self._num_fed
        return _delta(self._stops.flush(), shown)


def _delta(text: str, logprobs: Sequence[TextLogprob]) -> list[TextDelta]:
    return [TextDelta(text=text, logprobs=tuple(logprobs))] if text or logprobs else []
