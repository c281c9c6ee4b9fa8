"""Request traces from files: the Azure LLM inference CSV and the Mooncake JSON lines.

Azure: a header with `TIMESTAMP,ContextTokens,GeneratedTokens`, one request a row. Mooncake: an
object a line with `timestamp` (ms), `input_length`, `output_length` and `hash_ids`, one id for each
512 tokens of the prompt; equal ids mean an equal prefix up to there. Both may be gzipped.
"""

from __future__ import annotations

import csv
import gzip
import itertools
import zlib
from collections.abc import Callable, Iterator
from datetime import UTC, datetime
from io import BufferedIOBase
from pathlib import Path
from typing import Annotated, NamedTuple

import msgspec
from msgspec import Meta

from perilune.gateway.load.errors import TraceError

BLOCK_TOKENS = 512
"""Prompt tokens that one Mooncake hash id stands for."""

MAX_TOKENS = 2**24
MAX_SECONDS = 10 * 366 * 86_400.0
MAX_LINE_BYTES = 2**20
"""What is beyond these is no trace but a damaged file."""

_AZURE = ("TIMESTAMP", "ContextTokens", "GeneratedTokens")
_GZIP = b"\x1f\x8b"


class TracedRequest(NamedTuple):
    arrival_s: float
    """Since the first request of the file."""
    prompt_tokens: int
    output_tokens: int
    block_ids: tuple[int, ...] = ()
    """One for each BLOCK_TOKENS of the prompt, the last one maybe for fewer; empty where the trace
    says nothing about contents."""


class _Line(NamedTuple):
    number: int
    data: bytes


Parser = Callable[[bytes], TracedRequest]


def read_trace(path: Path) -> Iterator[TracedRequest]:
    """The requests of the file, in its order, read as they are asked for.

    Raises:
        TraceError: the file is no trace, holds none, or a line of it is wrong.
        OSError: it cannot be opened.
    """
    with _open(path) as file:
        lines = _lines(file, path)
        first = next(lines, None)
        if first is None:
            raise TraceError(f"{path} is empty")
        parse: Parser
        if first.data.startswith(b"{"):
            lines, parse = itertools.chain([first], lines), _parse_mooncake
        else:
            parse = _azure_parser(first, path)
        yield from _in_order(lines, parse, path)


def _open(path: Path) -> BufferedIOBase:
    with path.open("rb") as file:
        packed = file.read(2) == _GZIP
    return gzip.open(path) if packed else path.open("rb")


def _lines(file: BufferedIOBase, path: Path) -> Iterator[_Line]:
    """Lines that hold something, without their ends."""
    for number in itertools.count(1):
        try:
            data = file.readline(MAX_LINE_BYTES + 1)
        except (gzip.BadGzipFile, EOFError, zlib.error) as error:
            raise _wrong(path, number, f"the gzip data is damaged ({error})") from None
        if not data:
            return
        if len(data) > MAX_LINE_BYTES:
            raise _wrong(path, number, f"longer than {MAX_LINE_BYTES} bytes")
        if data.strip():
            yield _Line(number, data.strip())


def _in_order(lines: Iterator[_Line], parse: Parser, path: Path) -> Iterator[TracedRequest]:
    first_s = previous_s = None
    for line in lines:
        try:
            request = parse(line.data)
        except (ValueError, OverflowError, csv.Error) as error:  # msgspec's are ValueErrors
            raise _wrong(path, line.number, str(error)) from None
        except RecursionError:
            raise _wrong(path, line.number, "nested too deeply") from None
        if previous_s is not None and request.arrival_s < previous_s:
            back_s = previous_s - request.arrival_s
            raise _wrong(path, line.number, f"{back_s:.6g} s before the line above it")
        previous_s = request.arrival_s
        first_s = previous_s if first_s is None else first_s
        if previous_s - first_s > MAX_SECONDS:
            raise _wrong(path, line.number, "more than ten years after the first request")
        yield request._replace(arrival_s=previous_s - first_s)
    if first_s is None:
        raise TraceError(f"{path} holds no request")


def _wrong(path: Path, number: int, what: str) -> TraceError:
    return TraceError(f"{path}, line {number}: {what[:300]}")


class _MooncakeLine(msgspec.Struct):
    timestamp: Annotated[float, Meta(ge=0, le=MAX_SECONDS * 1e3)]
    input_length: Annotated[int, Meta(ge=1, le=MAX_TOKENS)]
    output_length: Annotated[int, Meta(ge=0, le=MAX_TOKENS)]
    hash_ids: list[Annotated[int, Meta(ge=0, le=2**63 - 1)]]


_MOONCAKE = msgspec.json.Decoder(_MooncakeLine)


def _parse_mooncake(data: bytes) -> TracedRequest:
    line = _MOONCAKE.decode(data)
    num_blocks = -(-line.input_length // BLOCK_TOKENS)
    if len(line.hash_ids) != num_blocks:
        raise ValueError(
            f"{line.input_length} tokens are {num_blocks} blocks of {BLOCK_TOKENS},"
            f" but there are {len(line.hash_ids)} hash_ids"
        )
    return TracedRequest(
        line.timestamp / 1e3, line.input_length, line.output_length, tuple(line.hash_ids)
    )


def _azure_parser(header: _Line, path: Path) -> Parser:
    names = _cells(header.data.removeprefix(b"\xef\xbb\xbf"), path, header.number)
    missing = [name for name in _AZURE if name not in names]
    if missing:
        raise _wrong(
            path,
            header.number,
            f"no column {', '.join(missing)}; known are the Azure CSV with {','.join(_AZURE)}"
            " and the Mooncake JSON lines",
        )
    columns = [names.index(name) for name in _AZURE]

    def parse(data: bytes) -> TracedRequest:
        cells = next(csv.reader([data.decode()]))
        if len(cells) != len(names):
            raise ValueError(f"{len(cells)} columns, and the header has {len(names)}")
        time, prompt, output = (cells[column] for column in columns)
        return TracedRequest(
            _seconds(time), _count(prompt, _AZURE[1], least=1), _count(output, _AZURE[2], least=0)
        )

    return parse


def _cells(data: bytes, path: Path, number: int) -> list[str]:
    try:
        return next(csv.reader([data.decode()]))
    except (UnicodeDecodeError, csv.Error):
        raise _wrong(path, number, "neither a CSV header nor JSON") from None


def _seconds(text: str) -> float:
    time = datetime.fromisoformat(text)
    return (time if time.tzinfo else time.replace(tzinfo=UTC)).timestamp()


def _count(text: str, name: str, *, least: int) -> int:
    # int() reads underscores, signs and other alphabets' digits too.
    if not (text.isascii() and text.isdecimal()) or len(text) > 12:
        raise ValueError(f"{name} is {text[:40]!r} and not a number of tokens")
    if not least <= int(text) <= MAX_TOKENS:
        raise ValueError(f"{name} is {int(text)}, outside {least}..{MAX_TOKENS}")
    return int(text)
