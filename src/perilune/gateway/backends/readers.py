"""Generated tokens into what the client sees, for a chat answer and for raw text."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Protocol

from perilune.core.types import ReasoningDelta, TextDelta, TextLogprob, ToolCallDelta
from perilune.gateway.backends.shown_text import ShownText
from perilune.text.chat import ChatParser
from perilune.text.detokenizer import Detokenizer
from perilune.text.tokenizer import Tokenizer

OutputDelta = ReasoningDelta | TextDelta | ToolCallDelta


class Reader(Protocol):
    """Reads the tokens of one answer."""

    @property
    def stopped(self) -> bool:
        """A stop string came: the answer is over, whatever the engine would add."""
        ...

    @property
    def num_calls(self) -> int: ...

    @property
    def reasoning_tokens(self) -> int: ...

    def feed(
        self, token_id: int, logprob: TextLogprob | None, *, ends: bool
    ) -> Iterator[OutputDelta]:
        """Deltas that the token completes; `ends` marks the stop token."""
        ...

    def finish(self) -> Iterator[OutputDelta]:
        """Deltas that were waiting, at the end."""
        ...


class ChatReader:
    """Stop strings apply to the answer's text, not to reasoning or arguments."""

    def __init__(self, parser: ChatParser, stops: Sequence[str]) -> None:
        self._parser = parser
        self._shown = ShownText(stops)

    @property
    def stopped(self) -> bool:
        return self._shown.stopped

    @property
    def num_calls(self) -> int:
        return self._parser.num_calls

    @property
    def reasoning_tokens(self) -> int:
        return self._parser.reasoning_tokens

    def feed(
        self, token_id: int, logprob: TextLogprob | None, *, ends: bool
    ) -> Iterator[OutputDelta]:
        return self._show(self._parser.feed(token_id, logprob))

    def finish(self) -> Iterator[OutputDelta]:
        yield from self._show(self._parser.finish())
        yield from self._shown.finish()

    def _show(self, deltas: Sequence[OutputDelta]) -> Iterator[OutputDelta]:
        for delta in deltas:
            if self.stopped:
                return
            if isinstance(delta, TextDelta):
                yield from self._shown.feed(delta.text, delta.logprobs)
            elif isinstance(delta, ToolCallDelta):
                yield from self._shown.finish()  # the text before a call is complete
                yield delta
            else:
                yield delta


class CompletionReader:
    """Text as it is; the stop token and other control tokens are left out."""

    num_calls = 0
    reasoning_tokens = 0

    def __init__(self, tokenizer: Tokenizer, stops: Sequence[str]) -> None:
        self._detokenizer = Detokenizer(tokenizer)
        self._shown = ShownText(stops)

    @property
    def stopped(self) -> bool:
        return self._shown.stopped

    def feed(
        self, token_id: int, logprob: TextLogprob | None, *, ends: bool
    ) -> Iterator[OutputDelta]:
        if not ends:
            text = self._detokenizer.feed(token_id)
            yield from self._shown.feed(text, () if logprob is None else (logprob,))

    def finish(self) -> Iterator[OutputDelta]:
        if not self.stopped:
            yield from self._shown.feed(self._detokenizer.flush(), ())
        yield from self._shown.finish()
