"""Text events into `text_completion` bodies and chunks."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, field

import msgspec
from msgspec import UNSET

from perilune.core.types import Finish, TextDelta, TextLogprob
from perilune.gateway.answer_head import AnswerHead, Numbered
from perilune.gateway.fanout import closing
from perilune.gateway.openai import CompletionCall
from perilune.gateway.response_types import CompletionChoice, CompletionLogprobs
from perilune.gateway.usage_sum import UsageSum

_encode = msgspec.json.Encoder().encode


async def completion_chunks(
    events: AsyncIterator[Numbered], head: AnswerHead, call: CompletionCall
) -> AsyncIterator[bytes]:
    """One JSON chunk an event; usage, if wanted, comes last."""
    usage = UsageSum(choices_per_prompt=call.num_choices)
    no_usage = None if call.delivery.include_usage else UNSET
    choices = [_Choice() for _ in call.requests]
    async with closing(events):
        async for index, event in events:
            match event:
                case TextDelta():
                    choice = choices[index].chunk(index, event)
                case Finish():
                    usage.add(index, event.usage)
                    choice = CompletionChoice(index=index, text="", finish_reason=event.reason)
                case _:
                    continue
            yield _encode(head.answer("text_completion", [choice], no_usage))
    if call.delivery.include_usage:
        yield _encode(head.answer("text_completion", [], usage.body()))


async def completion_answer(
    events: AsyncIterator[Numbered], head: AnswerHead, call: CompletionCall
) -> bytes:
    """The whole answer as JSON, once every choice has finished."""
    usage = UsageSum(choices_per_prompt=call.num_choices)
    choices = [_Choice() for _ in call.requests]
    async for index, event in events:
        match event:
            case TextDelta():
                choices[index].add(event)
            case Finish():
                usage.add(index, event.usage)
                choices[index].finish_reason = event.reason
    bodies = [
        choice.body(index, request.sampling.logprobs is not None)
        for index, (choice, request) in enumerate(zip(choices, call.requests, strict=True))
    ]
    return _encode(head.answer("text_completion", bodies, usage.body()))


@dataclass(slots=True)
class _Choice:
    """One choice of an answer while it grows."""

    text: list[str] = field(default_factory=list)
    logprobs: list[TextLogprob] = field(default_factory=list)
    finish_reason: str = ""
    num_chars: int = 0
    """Characters that the streamed logprobs have covered, for `text_offset`."""

    def add(self, event: TextDelta) -> None:
        self.text.append(event.text)
        self.logprobs += event.logprobs

    def chunk(self, index: int, event: TextDelta) -> CompletionChoice:
        logprobs = _logprobs(event.logprobs, self.num_chars) if event.logprobs else None
        self.num_chars += sum(len(item.token) for item in event.logprobs)
        return CompletionChoice(index=index, text=event.text, logprobs=logprobs)

    def body(self, index: int, logprobs: bool) -> CompletionChoice:
        return CompletionChoice(
            index=index,
            text="".join(self.text),
            logprobs=_logprobs(self.logprobs, 0) if logprobs else None,
            finish_reason=self.finish_reason,
        )


def _logprobs(items: Sequence[TextLogprob], offset: int) -> CompletionLogprobs:
    """`offset`: characters before the first of `items`."""
    body = CompletionLogprobs(tokens=[], token_logprobs=[], top_logprobs=[], text_offset=[])
    for item in items:
        body.tokens.append(item.token)
        body.token_logprobs.append(item.logprob)
        body.text_offset.append(offset)
        top = {item.token: item.logprob}
        for token, _, logprob in item.top:
            top.setdefault(token, logprob)
        body.top_logprobs.append(top)
        offset += len(item.token)
    return body
