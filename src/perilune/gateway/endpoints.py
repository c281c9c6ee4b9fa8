"""The endpoints that call a model: body in, answer or event stream out."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass
from typing import Generic, TypeVar

from perilune.core.protocols import ChatModel
from perilune.core.types import ChatEvent
from perilune.gateway.answer_head import AnswerHead, Numbered
from perilune.gateway.chat_reply import chat_answer, chat_chunks
from perilune.gateway.completion_reply import completion_answer, completion_chunks
from perilune.gateway.fanout import closing, merge
from perilune.gateway.observe import observe
from perilune.gateway.openai import ChatCall, CompletionCall, parse_chat, parse_completion
from perilune.gateway.reply import JSON, Reply
from perilune.gateway.router import Router
from perilune.gateway.rsgi import HeaderList, HttpProtocol
from perilune.gateway.stream import send_stream
from perilune.telemetry.metrics import CallTimer, ServerMetrics

C = TypeVar("C", ChatCall, CompletionCall)

LOOP_BYTES = 2**15
"""A longer body is read in a thread. One of 4 MiB in short messages takes 0.8 s, in which no stream
would get on; at this length it takes 7 ms, and a thread costs 0.1 ms."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Endpoint(Generic[C]):
    """What distinguishes one endpoint from the other."""

    operation: str
    """`gen_ai.operation.name` in the metrics."""
    id_prefix: str
    parse: Callable[[bytes, str], C]
    start: Callable[[ChatModel, C], list[AsyncIterator[ChatEvent]]]
    """One event stream a choice; nothing runs before it is iterated."""
    chunks: Callable[[AsyncIterator[Numbered], AnswerHead, C], AsyncIterator[bytes]]
    answer: Callable[[AsyncIterator[Numbered], AnswerHead, C], Awaitable[bytes]]


CHAT: Endpoint[ChatCall] = Endpoint(
    operation="chat",
    id_prefix="chatcmpl-",
    parse=parse_chat,
    start=lambda model, call: [model.chat(request) for request in call.requests],
    chunks=chat_chunks,
    answer=chat_answer,
)
COMPLETION: Endpoint[CompletionCall] = Endpoint(
    operation="text_completion",
    id_prefix="cmpl-",
    parse=parse_completion,
    start=lambda model, call: [model.complete(request) for request in call.requests],
    chunks=completion_chunks,
    answer=completion_answer,
)


class ModelCaller:
    """Runs calls of both endpoints against the models of a router."""

    def __init__(self, router: Router, metrics: ServerMetrics, *, ping_interval_s: float) -> None:
        self._router = router
        self._metrics = metrics
        self._ping_interval_s = ping_interval_s

    async def answer(
        self,
        endpoint: Endpoint[C],
        body: bytes,
        proto: HttpProtocol,
        request_id: str,
        headers: HeaderList,
        on_fault: Callable[[Exception], None],
    ) -> Reply | None:
        """The answer, or None after it went out as a stream with `headers`.

        `on_fault` hears of an error that comes when the stream is open.

        Raises:
            PeriluneError: nothing has been sent yet.
        """
        call_id = endpoint.id_prefix + request_id
        if len(body) > LOOP_BYTES:
            call = await asyncio.to_thread(endpoint.parse, body, call_id)
        else:
            call = endpoint.parse(body, call_id)
        model = self._router.resolve(call.requests[0].model).model
        head = AnswerHead(id=call_id, model=model.model_id)
        streams = endpoint.start(model, call)
        timer = CallTimer(self._metrics, endpoint.operation, model.model_id)
        events = observe(merge(streams), len(streams), timer)
        if not call.delivery.stream:
            async with closing(events):
                return Reply(200, [JSON], await endpoint.answer(events, head, call))
        await send_stream(
            proto,
            endpoint.chunks(events, head, call),
            headers,
            ping_interval_s=self._ping_interval_s,
            on_fault=on_fault,
        )
        return None
