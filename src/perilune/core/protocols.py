"""The two seams of the stack: `Engine` (token ids in, token events out) and `ChatModel`."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Protocol

from perilune.core.types import (
    ChatEvent,
    ChatRequest,
    CompletionRequest,
    EngineInfo,
    EngineStats,
    TokenEvent,
    TokenRequest,
)


class Engine(Protocol):
    """Serves token sequences. Sees ids, never text."""

    @property
    def info(self) -> EngineInfo: ...

    def stats(self) -> EngineStats: ...

    def generate(self, request: TokenRequest) -> AsyncIterator[TokenEvent]:
        """Admits `request` on first iteration and yields its events in order.

        The last event carries `finish_reason`. Closing the iterator (or cancelling the task that
        iterates) aborts the sequence and frees its cache before the next step.

        Raises:
            ContextLengthError: the prompt does not fit, or leaves no room for one token.
            RequestError: an empty prompt, an id outside the vocabulary, a bad parameter.
            OverloadedError: the waiting queue is full.
        """
        ...

    async def close(self) -> None:
        """Ends every open request with an `error` event and frees everything."""
        ...


class ChatModel(Protocol):
    """Serves conversations: messages in, typed deltas out."""

    @property
    def model_id(self) -> str: ...

    def chat(self, request: ChatRequest) -> AsyncIterator[ChatEvent]:
        """Yields deltas; the last is `Finish`. Closing the iterator aborts. Raises as Engine, and
        DeadlineError after `request.timeout_s`."""
        ...

    def complete(self, request: CompletionRequest) -> AsyncIterator[ChatEvent]:
        """As `chat`, for a raw prompt: `TextDelta`s and one `Finish`."""
        ...
