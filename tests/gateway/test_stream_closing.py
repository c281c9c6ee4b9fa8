"""A failed send closes the events at once, not whenever the garbage collector finds them."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import pytest

from perilune.core.types import TextDelta
from perilune.gateway.answer_head import AnswerHead
from perilune.gateway.chat_reply import chat_chunks
from perilune.gateway.completion_reply import completion_chunks
from perilune.gateway.fanout import merge
from perilune.gateway.openai import parse_chat, parse_completion
from perilune.gateway.rsgi import ProtocolClosed
from perilune.gateway.stream import send_stream

CHAT = b'{"model":"m","messages":[{"role":"user","content":"x"}],"stream":true,"n":%d}'
COMPLETION = b'{"model":"m","prompt":"x","stream":true,"n":%d}'


class LostConnection:
    """A client that is gone when the `fails_at`-th send comes."""

    def __init__(self, fails_at: int) -> None:
        self.sends_left = fails_at

    def response_stream(self, status: int, headers: list) -> LostConnection:
        return self

    async def send_bytes(self, data: bytes) -> None:
        self.sends_left -= 1
        if not self.sends_left:
            raise ProtocolClosed("gone")


async def endless(closed: list[int], index: int) -> AsyncIterator[TextDelta]:
    try:
        while True:
            yield TextDelta(text="x")
            await asyncio.sleep(0)
    finally:
        closed.append(index)


@pytest.mark.parametrize("n", [1, 3])
@pytest.mark.parametrize("fails_at", [1, 2, 5])
@pytest.mark.parametrize(
    ("parse", "body", "chunks_of"),
    [(parse_chat, CHAT, chat_chunks), (parse_completion, COMPLETION, completion_chunks)],
    ids=["chat", "completion"],
)
def test_every_source_is_closed_when_send_stream_returns(parse, body, chunks_of, fails_at, n):
    async def send() -> list[int]:
        closed: list[int] = []
        call = parse(body % n, "id")
        events = merge([endless(closed, index) for index in range(n)])
        chunks = chunks_of(events, AnswerHead(id="id", model="m"), call)
        with pytest.raises(ProtocolClosed):
            await send_stream(
                LostConnection(fails_at), chunks, [], ping_interval_s=100, on_fault=pytest.fail
            )
        return sorted(closed)

    assert asyncio.run(send()) == list(range(n))
