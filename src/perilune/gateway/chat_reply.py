"""Chat events into `chat.completion` bodies and `chat.completion.chunk`s."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, field

import msgspec
from msgspec import UNSET

from perilune.core.types import (
    ChatEvent,
    Finish,
    ReasoningDelta,
    TextDelta,
    TextLogprob,
    ToolCallDelta,
)
from perilune.gateway.answer_head import AnswerHead, Numbered
from perilune.gateway.fanout import closing
from perilune.gateway.openai import ChatCall
from perilune.gateway.response_types import (
    AssistantMessage,
    ChatChoice,
    ChatLogprobs,
    ChunkChoice,
    Delta,
    FunctionDelta,
    TokenLogprobBody,
    ToolCallDeltaBody,
    TopLogprob,
)
from perilune.gateway.usage_sum import UsageSum

_encode = msgspec.json.Encoder().encode


async def chat_chunks(
    events: AsyncIterator[Numbered], head: AnswerHead, call: ChatCall
) -> AsyncIterator[bytes]:
    """One JSON chunk an event. A choice opens with its role; usage, if wanted, comes last."""
    usage = UsageSum(choices_per_prompt=len(call.requests))
    no_usage = None if call.delivery.include_usage else UNSET
    opened: set[int] = set()
    async with closing(events):
        async for index, event in events:
            if index not in opened:
                opened.add(index)
                opening = ChunkChoice(index=index, delta=Delta(role="assistant", content=""))
                yield _encode(head.answer("chat.completion.chunk", [opening], no_usage))
            if isinstance(event, Finish):
                usage.add(index, event.usage)
            yield _encode(head.answer("chat.completion.chunk", [_chunk(index, event)], no_usage))
    if call.delivery.include_usage:
        yield _encode(head.answer("chat.completion.chunk", [], usage.body()))


async def chat_answer(events: AsyncIterator[Numbered], head: AnswerHead, call: ChatCall) -> bytes:
    """The whole answer as JSON, once every choice has finished."""
    usage = UsageSum(choices_per_prompt=len(call.requests))
    choices = [_Choice() for _ in call.requests]
    async for index, event in events:
        choices[index].add(event)
        if isinstance(event, Finish):
            usage.add(index, event.usage)
    logprobs = call.requests[0].sampling.logprobs is not None
    bodies = [choice.body(index, logprobs) for index, choice in enumerate(choices)]
    return _encode(head.answer("chat.completion", bodies, usage.body()))


def _chunk(index: int, event: ChatEvent) -> ChunkChoice:
    match event:
        case TextDelta():
            logprobs = ChatLogprobs(_logprobs(event.logprobs)) if event.logprobs else None
            return ChunkChoice(index=index, delta=Delta(content=event.text), logprobs=logprobs)
        case ReasoningDelta():
            logprobs = (
                ChatLogprobs([], reasoning_content=_logprobs(event.logprobs))
                if event.logprobs
                else None
            )
            delta = Delta(reasoning_content=event.text)
            return ChunkChoice(index=index, delta=delta, logprobs=logprobs)
        case ToolCallDelta():
            return ChunkChoice(index=index, delta=Delta(tool_calls=[_tool_call_delta(event)]))
        case Finish():
            return ChunkChoice(index=index, delta=Delta(), finish_reason=event.reason)


def _tool_call_delta(event: ToolCallDelta) -> ToolCallDeltaBody:
    if event.id is None:
        return ToolCallDeltaBody(FunctionDelta(arguments=event.arguments), index=event.index)
    function = FunctionDelta(name=event.name or "", arguments=event.arguments)
    return ToolCallDeltaBody(function, index=event.index, id=event.id, type="function")


def _logprobs(logprobs: Sequence[TextLogprob]) -> list[TokenLogprobBody]:
    return [
        TokenLogprobBody(
            token=item.token,
            logprob=item.logprob,
            bytes=list(item.token_bytes),
            top_logprobs=[
                TopLogprob(token=token, logprob=logprob, bytes=list(token_bytes))
                for token, token_bytes, logprob in item.top
            ],
        )
        for item in logprobs
    ]


@dataclass(slots=True)
class _ToolCall:
    id: str = ""
    name: str = ""
    arguments: list[str] = field(default_factory=list)

    def add(self, delta: ToolCallDelta) -> None:
        self.id = delta.id or self.id
        self.name = delta.name or self.name
        self.arguments.append(delta.arguments)

    def body(self) -> ToolCallDeltaBody:
        function = FunctionDelta(name=self.name, arguments="".join(self.arguments))
        return ToolCallDeltaBody(function, id=self.id, type="function")


@dataclass(slots=True)
class _Choice:
    """One choice of an answer while it grows."""

    text: list[str] = field(default_factory=list)
    reasoning: list[str] = field(default_factory=list)
    calls: dict[int, _ToolCall] = field(default_factory=dict)
    text_logprobs: list[TextLogprob] = field(default_factory=list)
    reasoning_logprobs: list[TextLogprob] = field(default_factory=list)
    finish_reason: str = ""

    def add(self, event: ChatEvent) -> None:
        match event:
            case TextDelta():
                self.text.append(event.text)
                self.text_logprobs += event.logprobs
            case ReasoningDelta():
                self.reasoning.append(event.text)
                self.reasoning_logprobs += event.logprobs
            case ToolCallDelta():
                self.calls.setdefault(event.index, _ToolCall()).add(event)
            case Finish():
                self.finish_reason = event.reason

    def body(self, index: int, logprobs: bool) -> ChatChoice:
        text, reasoning = "".join(self.text), "".join(self.reasoning)
        message = AssistantMessage(
            content=text if text or not self.calls else None,
            reasoning_content=reasoning or UNSET,
            tool_calls=[call.body() for call in self.calls.values()] or UNSET,
        )
        return ChatChoice(
            index=index,
            message=message,
            logprobs=self._logprobs() if logprobs else None,
            finish_reason=self.finish_reason,
        )

    def _logprobs(self) -> ChatLogprobs:
        return ChatLogprobs(
            content=_logprobs(self.text_logprobs),
            reasoning_content=_logprobs(self.reasoning_logprobs) or UNSET,
        )
