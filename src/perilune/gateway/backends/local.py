"""A ChatModel on an engine in reach: messages to ids, ids through the engine, ids to deltas."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Sequence

from perilune.core.errors import DeadlineError, EngineError
from perilune.core.protocols import Engine
from perilune.core.types import (
    ChatEvent,
    ChatRequest,
    CompletionRequest,
    Finish,
    FinishReason,
    Grammar,
    TextDelta,
    TextLogprob,
    TokenEvent,
    TokenLogprob,
    TokenRequest,
    Usage,
)
from perilune.gateway.backends.readers import ChatReader, CompletionReader, Reader
from perilune.gateway.fanout import closing
from perilune.text.chat import ChatFormat
from perilune.text.errors import TextError
from perilune.text.tokenizer import Tokenizer


class LocalModel:
    """Serves the engine's model. Holds no state between requests."""

    def __init__(self, engine: Engine, chat_format: ChatFormat) -> None:
        self._engine = engine
        self._format = chat_format
        self._tokenizer = chat_format.tokenizer

    @property
    def model_id(self) -> str:
        return self._engine.info.model_id

    @property
    def max_context(self) -> int:
        """Prompt and answer together, in tokens."""
        return self._engine.info.max_context

    async def chat(self, request: ChatRequest) -> AsyncIterator[ChatEvent]:
        """As `ChatModel.chat`. Raises RequestError for a conversation that cannot be written."""
        # In a thread: a long prompt must not hold up the streams of the others.
        prompt_ids, grammar = await asyncio.to_thread(self._encode, request)
        reader = ChatReader(self._format.parser(request), request.stop)
        stop_ids = self._format.stop_ids
        tokens = self._token_request(request, prompt_ids, stop_ids, grammar=grammar)
        async with closing(self._run(tokens, reader, request.timeout_s)) as events:
            async for event in events:
                yield event

    async def complete(self, request: CompletionRequest) -> AsyncIterator[ChatEvent]:
        """As `ChatModel.complete`. Names of control tokens in a prompt are ordinary text."""
        prompt = request.prompt
        if isinstance(prompt, str):
            prompt_ids = await asyncio.to_thread(self._tokenizer.encode, prompt)
        else:
            prompt_ids = prompt
        reader = CompletionReader(self._tokenizer, request.stop)
        stop_ids = frozenset[int]() if request.ignore_eos else self._tokenizer.eos_ids
        tokens = self._token_request(request, prompt_ids, stop_ids, ignore_eos=request.ignore_eos)
        echo = ""
        if request.echo:
            echo = await asyncio.to_thread(self._tokenizer.decode, prompt_ids)
        async with closing(self._run(tokens, reader, request.timeout_s)) as events:
            async for event in events:
                if echo:  # only now, since a refused prompt must not be shown first
                    yield TextDelta(text=echo)
                    echo = ""
                yield event

    def _encode(self, request: ChatRequest) -> tuple[list[int], Grammar | None]:
        grammar = self._format.grammar(request)  # first: a wrong schema is in the prompt, too
        return self._format.encode(request), grammar

    def _token_request(
        self,
        request: ChatRequest | CompletionRequest,
        prompt_ids: Sequence[int],
        stop_ids: frozenset[int],
        *,
        ignore_eos: bool = False,
        grammar: Grammar | None = None,
    ) -> TokenRequest:
        room = max(1, self.max_context - len(prompt_ids))  # the engine refuses a prompt without
        return TokenRequest(
            request_id=request.request_id,
            prompt_ids=tuple(prompt_ids),
            max_tokens=room if request.max_tokens is None else min(request.max_tokens, room),
            sampling=request.sampling,
            stop_ids=stop_ids,
            ignore_eos=ignore_eos,
            grammar=grammar,
            priority=request.priority,
            tenant=request.tenant,
            pin_s=request.cache_ttl_s,
        )

    async def _run(
        self, tokens: TokenRequest, reader: Reader, timeout_s: float | None
    ) -> AsyncIterator[ChatEvent]:
        num_tokens, last = 0, TokenEvent(request_id=tokens.request_id, token_id=None)
        reason: FinishReason | None = None
        async with (
            closing(self._engine.generate(tokens)) as untimed,
            closing(_in_time(untimed, timeout_s)) as events,
        ):
            async for event in events:
                reason = event.finish_reason
                if reason == "error":
                    raise EngineError(event.error or "the engine failed")
                last = event
                if event.token_id is not None:
                    num_tokens += 1
                    for delta in self._read(event, event.token_id, reader):
                        yield delta
                if reader.stopped:
                    reason = "stop"
                    break
        if reason is None or reason == "error":
            raise EngineError("the engine ended the sequence without a reason")
        for delta in reader.finish():
            yield delta
        yield Finish(
            reason="tool_calls" if reason == "stop" and reader.num_calls else reason,
            usage=Usage(
                prompt_tokens=len(tokens.prompt_ids),
                completion_tokens=num_tokens,
                reasoning_tokens=reader.reasoning_tokens,
                cached_tokens=last.cached_tokens,
                written_tokens=last.written_tokens,
                pinned_tokens=last.pinned_tokens,
            ),
        )

    def _read(self, event: TokenEvent, token_id: int, reader: Reader) -> list[ChatEvent]:
        try:
            logprob = _to_text(event.logprob, self._tokenizer)
            return list(reader.feed(token_id, logprob, ends=event.finish_reason == "stop"))
        except TextError as error:  # not the client's fault, which a TextError would mean
            raise EngineError(f"the model wrote what its tokenizer cannot read: {error}") from error


async def _in_time(
    events: AsyncIterator[TokenEvent], timeout_s: float | None
) -> AsyncIterator[TokenEvent]:
    """Raises DeadlineError where there is no next event `timeout_s` from now. The time that the
    reader of these events takes counts, too."""
    if timeout_s is None:
        async for event in events:
            yield event
        return
    ends_s = time.monotonic() + timeout_s
    while True:
        try:
            yield await asyncio.wait_for(anext(events), ends_s - time.monotonic())
        except StopAsyncIteration:
            return
        except TimeoutError:
            raise DeadlineError(f"the answer took longer than {timeout_s:g} s") from None


def _to_text(logprob: TokenLogprob | None, tokenizer: Tokenizer) -> TextLogprob | None:
    if logprob is None:
        return None
    token_bytes = tokenizer.token_bytes(logprob.token_id)
    top = ((tokenizer.token_bytes(token_id), value) for token_id, value in logprob.top)
    return TextLogprob(
        token=token_bytes.decode("utf-8", errors="replace"),
        token_bytes=token_bytes,
        logprob=logprob.logprob,
        top=tuple((data.decode("utf-8", errors="replace"), data, value) for data, value in top),
    )
