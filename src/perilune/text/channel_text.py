"""The text of one channel of a message on its way from bytes to deltas."""

from __future__ import annotations

from perilune.core.types import ReasoningDelta, TextDelta, TextLogprob
from perilune.text.chat import ChatDelta
from perilune.text.detokenizer import Utf8Stream


class ChannelText:
    """Bytes in, deltas out: never an empty one, never half a code point.

    Log-probabilities wait for the delta that shows their token's last byte.
    """

    def __init__(self, delta: type[ReasoningDelta] | type[TextDelta]) -> None:
        self._delta = delta
        self._stream = Utf8Stream()
        self._logprobs: list[TextLogprob] = []

    def push(self, data: bytes, logprob: TextLogprob | None = None) -> list[ChatDelta]:
        if logprob is not None:
            self._logprobs.append(logprob)
        return self._emit(self._stream.push(data))

    def flush(self) -> list[ChatDelta]:
        """What still waits, when the channel ends."""
        return self._emit(self._stream.flush())

    def _emit(self, text: str) -> list[ChatDelta]:
        if not text:
            return []
        logprobs, self._logprobs = tuple(self._logprobs), []
        return [self._delta(text=text, logprobs=logprobs)]
