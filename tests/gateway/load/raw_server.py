"""An HTTP server that says what it is told to, right or wrong."""

from __future__ import annotations

import asyncio
import contextlib
import json
import re
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

MODELS = json.dumps({"data": [{"id": "m", "max_model_len": 1000}, {"id": "n"}]})


def reply(body: str | bytes, status: str = "200 OK", *headers: str) -> bytes:
    data = body if isinstance(body, bytes) else body.encode()
    lines = [f"HTTP/1.1 {status}", f"content-length: {len(data)}", *headers, "", ""]
    return "\r\n".join(lines).encode() + data


def stream(*events: dict | str) -> bytes:
    texts = (event if isinstance(event, str) else json.dumps(event) for event in events)
    return reply("".join(f"data: {text}\n\n" for text in texts), "200 OK", "x-kind: stream")


def piece(text: str, finish: str | None = None) -> dict:
    return {"choices": [{"index": 0, "text": text, "finish_reason": finish}]}


def usage(prompt: int, output: int, cached: int | None = None) -> dict:
    details = None if cached is None else {"cached_tokens": cached}
    counts = {"prompt_tokens": prompt, "completion_tokens": output}
    return {"choices": [], "usage": counts | {"prompt_tokens_details": details}}


GOOD = stream(piece("a"), piece("b"), piece("", "length"), usage(3, 2), "[DONE]")


class RawServer:
    """`answers` gives the response to each POST by its number; None says nothing at all."""

    def __init__(self, answers: Callable[[int], bytes | None] = lambda number: GOOD) -> None:
        self.answers = answers
        self.models = reply(MODELS)
        self.metrics: Callable[[], bytes] = lambda: reply("", "404 Not Found")
        self.bodies: list[dict] = []
        self.heads: list[str] = []

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """One connection, which ends after an answer that is not as long as it says."""
        with contextlib.suppress(asyncio.IncompleteReadError, ConnectionError):
            while True:
                head = (await reader.readuntil(b"\r\n\r\n")).decode()
                self.heads.append(head)
                body = await reader.readexactly(_length(head) or 0)
                answer = self._answer(head, body)
                if answer is None:
                    await reader.read()
                    break
                writer.write(answer)
                said, _, rest = answer.partition(b"\r\n\r\n")
                if _length(said.decode()) != len(rest):
                    break
        writer.close()

    def _answer(self, head: str, body: bytes) -> bytes | None:
        if head.startswith("GET /v1/models "):
            return self.models
        if head.startswith("GET /metrics "):
            return self.metrics()
        self.bodies.append(json.loads(body))
        return self.answers(len(self.bodies) - 1)


def _length(head: str) -> int | None:
    found = re.search(r"content-length: (\d+)", head, re.IGNORECASE)
    return None if found is None else int(found[1])


@asynccontextmanager
async def running(server: RawServer) -> AsyncIterator[str]:
    """Its URL."""
    open_ones: dict[asyncio.StreamWriter, asyncio.Task] = {}

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        open_ones[writer] = asyncio.current_task()
        await server.serve(reader, writer)

    listening = await asyncio.start_server(serve, "127.0.0.1", 0)
    try:
        port = listening.sockets[0].getsockname()[1]
        yield f"http://127.0.0.1:{port}"
    finally:
        listening.close()
        for writer in open_ones:
            writer.close()
        await asyncio.gather(*open_ones.values())
