"""The stream of an answer: server-sent events of the OpenAI kind, as far as a clock needs them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import msgspec
from msgspec import Struct

from perilune.gateway.load.sample import OK, Sample

_MAX_EVENT_BYTES = 2**22


class BrokenStreamError(ValueError):
    """What came is no stream of an OpenAI-compatible server."""


class _Delta(Struct):
    content: str | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None
    tool_calls: list[Any] | None = None

    @property
    def has_output(self) -> bool:
        return any((self.content, self.reasoning_content, self.reasoning, self.tool_calls))


class _Choice(Struct):
    text: str | None = None
    delta: _Delta | None = None
    finish_reason: str | None = None


class _PromptDetails(Struct):
    cached_tokens: int | None = None


class _Usage(Struct):
    prompt_tokens: int | None = None
    completion_tokens: int | None = None
    prompt_tokens_details: _PromptDetails | None = None


class _Error(Struct):
    message: str | None = None


class _Chunk(Struct):
    choices: list[_Choice] = []
    usage: _Usage | None = None
    error: _Error | str | None = None
    system_fingerprint: str | None = None


class _ErrorBody(Struct):
    error: _Error | str | None = None
    message: str | None = None


_CHUNK = msgspec.json.Decoder(_Chunk)
_ERROR_BODY = msgspec.json.Decoder(_ErrorBody)


class AnswerReader:
    """Takes an answer's bytes as they come, with the time, into its sample."""

    def __init__(self, sample: Sample) -> None:
        self._sample = sample
        self._pending = b""
        self._finished = False

    def feed(self, data: bytes, at: float) -> None:
        """Raises BrokenStreamError: an event is not JSON of the known form."""
        *lines, self._pending = (self._pending + data).split(b"\n")
        if len(self._pending) > _MAX_EVENT_BYTES:
            raise BrokenStreamError(f"an event of more than {_MAX_EVENT_BYTES} bytes")
        for payload in _payloads(lines):
            self._read(payload, at)

    def end(self, at: float) -> None:
        """The connection gave its last byte; raises as `feed`."""
        self.feed(b"\n", at)
        if not self._sample.status:
            self._sample.status = OK if self._finished else "cut off"

    def _read(self, payload: bytes, at: float) -> None:
        try:
            chunk = _CHUNK.decode(payload)
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
            raise BrokenStreamError(f"{error}: {payload[:80]!r}") from None
        sample = self._sample
        if chunk.error is not None:
            sample.status, sample.message = "error in the stream", _text(chunk.error)
        for choice in chunk.choices:
            if choice.text or (choice.delta is not None and choice.delta.has_output):
                sample.saw_piece(at)
            if choice.finish_reason is not None:
                sample.saw_finish(at)
                self._finished = True
        sample.fingerprint = chunk.system_fingerprint or sample.fingerprint
        if chunk.usage is not None:
            self._note(chunk.usage)

    def _note(self, usage: _Usage) -> None:
        sample, details = self._sample, usage.prompt_tokens_details
        sample.prompt_tokens = usage.prompt_tokens
        sample.output_tokens = usage.completion_tokens
        sample.cached_tokens = None if details is None else details.cached_tokens


def _payloads(lines: list[bytes]) -> Iterator[bytes]:
    for line in lines:
        payload = line.removeprefix(b"data:").strip()
        if line.startswith(b"data:") and payload != b"[DONE]":
            yield payload


def error_text(body: bytes) -> str:
    """What an error's body says, shortened."""
    try:
        parsed = _ERROR_BODY.decode(body)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return body[:300].decode(errors="replace").strip()
    return _text(parsed.error or parsed.message or "")


def _text(error: _Error | str) -> str:
    return (error if isinstance(error, str) else error.message or "")[:300]
