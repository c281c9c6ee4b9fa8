"""Fakes of the two seams, used like the real ones: `FakeEngine` and `ScriptedModel`."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Callable, Iterable
from itertools import chain

from perilune.core.errors import ContextLengthError, EngineError, OverloadedError, RequestError
from perilune.core.types import (
    ChatEvent,
    ChatRequest,
    CompletionRequest,
    EngineInfo,
    EngineStats,
    FinishReason,
    TokenEvent,
    TokenLogprob,
    TokenRequest,
)

TokenScript = Callable[[TokenRequest], Iterable[int]]
"""The tokens that a request gets, maybe without end; the end token follows them."""


def echo(request: TokenRequest) -> Iterable[int]:
    """The prompt comes back."""
    return request.prompt_ids


class FakeEngine:
    """An `Engine` without a model: tokens come from a script, log-probabilities from a formula.

    It may be driven by one event loop and watched from another thread.
    """

    def __init__(
        self,
        script: TokenScript = echo,
        *,
        vocab_size: int = 512,
        max_context: int = 4096,
        eos_id: int = 258,
        model_id: str = "fake",
        max_open: int = 1024,
    ) -> None:
        self.script = script
        self.requests: list[TokenRequest] = []
        """Every admitted request, in order."""
        self.token_delay_s = 0.0
        self.fail_after: int | None = None
        """Break after so many tokens of a sequence, with an `error` event."""
        self.info = EngineInfo(
            model_id=model_id,
            vocab_size=vocab_size,
            max_context=max_context,
            eos_ids=frozenset({eos_id}),
        )
        self._eos_id = eos_id
        self._max_open = max_open
        self._closed = False
        self._resumed = asyncio.Event()
        self._resumed.set()
        self._changed = threading.Condition()
        self._num_open = 0
        self._prompt_tokens = 0
        self._generated_tokens = 0

    @property
    def num_open(self) -> int:
        """Sequences admitted and not yet freed."""
        return self._num_open

    def wait_for_open(self, num_open: int, timeout_s: float = 10.0) -> bool:
        """Blocks the calling thread until exactly `num_open` sequences are open."""
        with self._changed:
            return self._changed.wait_for(lambda: self._num_open == num_open, timeout_s)

    def pause(self) -> None:
        """No further token comes out; called in the engine's event loop, as is `resume`."""
        self._resumed.clear()

    def resume(self) -> None:
        self._resumed.set()

    def stats(self) -> EngineStats:
        return EngineStats(
            num_running=self._num_open,
            prompt_tokens_total=self._prompt_tokens,
            generated_tokens_total=self._generated_tokens,
        )

    async def generate(self, request: TokenRequest) -> AsyncIterator[TokenEvent]:
        self._check(request)
        self.requests.append(request)
        self._prompt_tokens += len(request.prompt_ids)
        self._count_open(+1)
        try:
            for event in self._events(request):
                await self._resumed.wait()
                await asyncio.sleep(self.token_delay_s)
                if self._closed:
                    event = _ended(request, "error", error="the engine is shutting down")
                self._generated_tokens += event.token_id is not None
                yield event
                if event.finish_reason is not None:
                    return
        finally:
            self._count_open(-1)

    async def close(self) -> None:
        self._closed = True
        self._resumed.set()

    def _check(self, request: TokenRequest) -> None:
        if self._closed:
            raise EngineError("the engine is closed")
        if not request.prompt_ids:
            raise RequestError("the prompt is empty", param="prompt")
        vocab_size = self.info.vocab_size
        named = (*request.prompt_ids, *request.sampling.logit_bias)
        outside = [token_id for token_id in named if token_id >= vocab_size]
        if outside:
            raise RequestError(f"token id {outside[0]} is outside the vocabulary of {vocab_size}")
        if len(request.prompt_ids) >= self.info.max_context:
            raise ContextLengthError(
                f"the prompt has {len(request.prompt_ids)} tokens; "
                f"this model's context holds {self.info.max_context} with the answer"
            )
        if self._num_open >= self._max_open:
            raise OverloadedError("the queue is full", retry_after_s=1.0)

    def _events(self, request: TokenRequest) -> Iterable[TokenEvent]:
        tokens = chain(self.script(request), [self._eos_id])
        for position, token_id in enumerate(tokens):
            if position == self.fail_after:
                yield _ended(request, "error", error="the fake engine broke on purpose")
            at_stop = token_id in request.stop_ids or (
                token_id in self.info.eos_ids and not request.ignore_eos
            )
            at_limit = position + 1 == request.max_tokens
            yield TokenEvent(
                request_id=request.request_id,
                token_id=token_id,
                logprob=self._logprob(request, token_id),
                finish_reason="stop" if at_stop else "length" if at_limit else None,
            )
        yield _ended(request, "length")

    def _logprob(self, request: TokenRequest, token_id: int) -> TokenLogprob | None:
        """The chosen token is the most likely one; the next ids follow at steps of one nat."""
        num_top = request.sampling.logprobs
        if num_top is None:
            return None
        vocab_size = self.info.vocab_size
        top = tuple(((token_id + rank) % vocab_size, -0.5 - rank) for rank in range(num_top))
        return TokenLogprob(token_id, -0.5, top)

    def _count_open(self, change: int) -> None:
        with self._changed:
            self._num_open += change
            self._changed.notify_all()


def _ended(request: TokenRequest, reason: FinishReason, error: str | None = None) -> TokenEvent:
    return TokenEvent(
        request_id=request.request_id, token_id=None, finish_reason=reason, error=error
    )


class ScriptedModel:
    """A `ChatModel` that answers with scripted events."""

    def __init__(
        self,
        script: Callable[[ChatRequest | CompletionRequest], Iterable[ChatEvent | Exception]],
        *,
        model_id: str = "scripted",
    ) -> None:
        """`script` gives the events of a request; an exception among them is raised."""
        self.model_id = model_id
        self.requests: list[ChatRequest | CompletionRequest] = []
        self._script = script

    def chat(self, request: ChatRequest) -> AsyncIterator[ChatEvent]:
        return self._play(request)

    def complete(self, request: CompletionRequest) -> AsyncIterator[ChatEvent]:
        return self._play(request)

    async def _play(self, request: ChatRequest | CompletionRequest) -> AsyncIterator[ChatEvent]:
        self.requests.append(request)
        for event in self._script(request):
            if isinstance(event, Exception):
                raise event
            yield event
