"""The HTTP side: requests to an OpenAI-compatible server, each timed into its sample."""

from __future__ import annotations

import asyncio
import re
import time
from collections.abc import AsyncGenerator, Mapping
from contextlib import asynccontextmanager
from typing import Any, Literal, NamedTuple

import aiohttp
import msgspec

from perilune.gateway.load.errors import TargetError
from perilune.gateway.load.prompts import PromptMaker
from perilune.gateway.load.sample import Sample
from perilune.gateway.load.sse import AnswerReader, BrokenStreamError, error_text
from perilune.gateway.load.workload import Request

Endpoint = Literal["completions", "chat"]

_PATHS: Mapping[Endpoint, str] = {"completions": "completions", "chat": "chat/completions"}
_MAX_ERROR_BYTES = 2**16
_TOO_MANY = 429
_DEFAULT_RETRY_S = 1.0
_FACTS_TIMEOUT_S = 10.0


class ModelCard(NamedTuple):
    model_id: str
    max_context: int | None
    """Prompt and answer together; None where the server does not say."""


class Client:
    """A server's address and how it is asked; to be opened in the loop that uses it."""

    def __init__(self, session: aiohttp.ClientSession, url: str) -> None:
        self._session = session
        self.root = re.sub(r"/v1/?$", "", url.rstrip("/"))

    async def model_card(self, model_id: str | None) -> ModelCard:
        """Of the named model, or of the first one on offer.

        Raises:
            TargetError: the server cannot be reached, or has no such model.
        """
        status, body = await self._get("/v1/models")
        if status != 200:
            raise TargetError(f"{self.root}/v1/models answers {status}: {error_text(body)}")
        try:
            cards = msgspec.json.decode(body, type=_Cards).data
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
            raise TargetError(f"{self.root}/v1/models is no list of models: {error}") from None
        for card in cards:
            if model_id in (None, card.id):
                return ModelCard(card.id, card.max_model_len)
        known = ", ".join(card.id for card in cards) or "none"
        raise TargetError(f"{self.root} has no model {model_id or ''}; it has: {known}")

    async def metrics(self) -> str | None:
        """The text of /metrics; None where the server has none."""
        status, body = await self._get("/metrics")
        return body.decode(errors="replace") if status == 200 else None

    async def _get(self, path: str) -> tuple[int, bytes]:
        try:
            async with asyncio.timeout(_FACTS_TIMEOUT_S), self._session.get(self.root + path) as r:
                return r.status, await r.read()
        except TimeoutError:
            raise TargetError(f"{self.root} did not answer in {_FACTS_TIMEOUT_S:g} s") from None
        except aiohttp.ClientConnectorError as error:
            reason = error.os_error.strerror or error.os_error
            raise TargetError(f"cannot reach {self.root}: {reason}") from None
        except (aiohttp.ClientError, OSError, ValueError) as error:
            raise TargetError(f"cannot ask {self.root}: {error or type(error).__name__}") from None


class _Card(msgspec.Struct):
    id: str
    max_model_len: int | None = None


class _Cards(msgspec.Struct):
    data: list[_Card]


class Asker:
    """Sends requests of one form."""

    def __init__(
        self,
        client: Client,
        prompts: PromptMaker,
        *,
        model_id: str,
        endpoint: Endpoint,
        timeout_s: float,
        max_retries: int,
        options: Mapping[str, Any],
    ) -> None:
        """`options` are fields of every body; `max_retries` counts answers with status 429."""
        self._session = client._session
        self._url = f"{client.root}/v1/{_PATHS[endpoint]}"
        self._prompts = prompts
        self._is_chat = endpoint == "chat"
        self._timeout_s = timeout_s
        self._max_retries = max_retries
        fixed = {"model": model_id, "stream": True, "stream_options": {"include_usage": True}}
        self._head = msgspec.json.encode({**fixed, **options})[:-1]

    def prepare(self, request: Request) -> bytes:
        """The body, to be made before the request is due."""
        prompt = self._prompts.json(request.blocks)
        if self._is_chat:
            field = b'"messages":[{"role":"user","content":%b}]' % prompt
        else:
            field = b'"prompt":%b' % prompt
        return b'%b,"max_tokens":%d,%b}' % (self._head, request.output_tokens, field)

    async def send(self, body: bytes, sample: Sample) -> None:
        """One request from start to end; whatever happens stands in `sample`, nothing is raised."""
        sample.sent_at = time.perf_counter()
        try:
            async with asyncio.timeout(sample.due_at + self._timeout_s - sample.sent_at):
                while await self._attempt(body, sample) == _TOO_MANY:
                    sample.num_429 += 1
                    if sample.num_429 > self._max_retries:
                        break
                    await asyncio.sleep(
                        _DEFAULT_RETRY_S if sample.retry_after_s is None else sample.retry_after_s
                    )
        except TimeoutError:
            sample.status, sample.is_censored = "timeout", True
        except BrokenStreamError as error:
            sample.status, sample.message = "no event stream", str(error)
        except aiohttp.ClientConnectorError as error:
            sample.status, sample.message = "no connection", str(error)
        except (aiohttp.ClientError, OSError) as error:
            sample.status, sample.message = "cut off", str(error) or type(error).__name__
        sample.ended_at = time.perf_counter()

    async def _attempt(self, body: bytes, sample: Sample) -> int:
        """The HTTP status."""
        headers = {"content-type": "application/json", "accept": "text/event-stream"}
        async with self._session.post(self._url, data=body, headers=headers) as response:
            if response.status != 200:
                sample.status = f"http {response.status}"
                sample.message = error_text(await response.content.read(_MAX_ERROR_BYTES))
                sample.retry_after_s = _seconds(response.headers.get("retry-after"))
                return response.status
            sample.status = sample.message = ""
            reader = AnswerReader(sample)
            async for data in response.content.iter_any():
                reader.feed(data, time.perf_counter())
            reader.end(time.perf_counter())
            return 200


def _seconds(text: str | None) -> float | None:
    """Of a Retry-After in seconds; its other form, a date, is not read."""
    if text is None or not re.fullmatch(r"\d{1,6}(\.\d{1,3})?", text):
        return None
    return float(text)


@asynccontextmanager
async def connected(url: str, api_key: str | None) -> AsyncGenerator[Client, None]:
    """A client for the server at `url`, with or without `/v1`.

    It opens as many connections as there are requests in flight: waiting for one would delay
    arrivals.
    """
    headers = {"accept-encoding": "identity"}  # a compressing proxy would hold events back
    if api_key is not None:
        headers["authorization"] = f"Bearer {api_key}"
    async with aiohttp.ClientSession(
        connector=aiohttp.TCPConnector(limit=0),
        timeout=aiohttp.ClientTimeout(total=None),
        headers=headers,
    ) as session:
        yield Client(session, url)
