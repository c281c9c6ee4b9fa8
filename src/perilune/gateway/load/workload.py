"""Traced requests as what is sent: lengths scaled, prompts as blocks, and a time for each."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import count, islice, takewhile
from random import Random
from typing import Literal, NamedTuple

from perilune.gateway.load.errors import WorkloadError
from perilune.gateway.load.traces import BLOCK_TOKENS, TracedRequest

Arrivals = Literal["trace", "poisson", "constant", "closed"]


class Block(NamedTuple):
    """A run of prompt tokens. Equal keys mean equal tokens, up to the shorter of the two."""

    key: str
    num_tokens: int


class Request(NamedTuple):
    """One request to send."""

    due_s: float
    """When, after the start; in a closed loop it has no meaning."""
    blocks: tuple[Block, ...]
    output_tokens: int

    @property
    def prompt_tokens(self) -> int:
        return sum(block.num_tokens for block in self.blocks)


@dataclass(frozen=True, slots=True, kw_only=True)
class Load:
    """How hard a server is pushed."""

    arrivals: Arrivals
    """`closed`: the next request goes out when an answer has come; all others do not wait."""
    rate: float | None = None
    """Requests a second; for `trace`, None keeps its own rate times `speed`."""
    speed: float = 1.0
    concurrency: int | None = None
    """Requests in flight of a closed loop."""

    def __str__(self) -> str:
        if self.arrivals == "closed":
            return f"{self.concurrency} at a time"
        if self.rate is None:
            return f"trace at {self.speed:g} times its speed"
        return f"{self.arrivals} at {self.rate:g}/s"


@dataclass(frozen=True, slots=True, kw_only=True)
class Bounds:
    """Where the arrivals end; None is no bound."""

    num_requests: int | None = None
    seconds: float | None = None


def fixed_lengths(prompt_tokens: int, output_tokens: int) -> Iterator[TracedRequest]:
    """Requests without end, a second apart, that share nothing."""
    for second in count():
        yield TracedRequest(float(second), prompt_tokens, output_tokens)


def scaled(traced: Iterable[TracedRequest], factor: float) -> Iterator[Request]:
    """Every length times `factor`, rounded, at least 1. Blocks that were equal stay equal."""
    block_tokens = _times(BLOCK_TOKENS, factor)
    for number, request in enumerate(traced):
        output_tokens = _times(request.output_tokens, factor)
        if request.block_ids:
            *full, last = request.block_ids
            rest = request.prompt_tokens - len(full) * BLOCK_TOKENS
            blocks = (
                *(Block(f"b{block_id}", block_tokens) for block_id in full),
                Block(f"b{last}", _times(rest, factor)),
            )
        else:
            blocks = (Block(f"r{number}", _times(request.prompt_tokens, factor)),)
        yield Request(request.arrival_s, blocks, output_tokens)


def _times(num_tokens: int, factor: float) -> int:
    return max(1, round(num_tokens * factor))


class Fitting:
    """Passes on the requests that `max_context` tokens hold, and counts the others."""

    def __init__(self, requests: Iterable[Request], max_context: int | None) -> None:
        self._requests = requests
        self._limit = math.inf if max_context is None else max_context
        self.num_left_out = 0

    def __iter__(self) -> Iterator[Request]:
        for request in self._requests:
            if request.prompt_tokens + request.output_tokens > self._limit:
                self.num_left_out += 1
            else:
                yield request


def schedule(
    requests: Iterable[Request], load: Load, bounds: Bounds, seed: int
) -> Iterator[Request]:
    """The requests with the times at which they are due, never falling.

    The seconds of a closed loop are not known here: whoever runs it ends it.

    Raises:
        WorkloadError: the trace's requests all come at once, so that no rate can be made of them.
    """
    if load.arrivals == "closed":
        return islice(requests, bounds.num_requests)
    if load.arrivals != "trace":
        times = _poisson(_rate(load), seed) if load.arrivals == "poisson" else _even(_rate(load))
        timed = (request._replace(due_s=due_s) for due_s, request in zip(times, requests))  # noqa: B905
    elif load.rate is None:
        timed = _at_speed(requests, load.speed)
    else:
        return iter(_at_rate(requests, load.rate, bounds))
    seconds = math.inf if bounds.seconds is None else bounds.seconds
    return islice(takewhile(lambda r: r.due_s < seconds, timed), bounds.num_requests)


def _rate(load: Load) -> float:
    if load.rate is None:
        raise WorkloadError(f"{load.arrivals} arrivals need a rate")
    return load.rate


def _even(rate: float) -> Iterator[float]:
    return (number / rate for number in count())


def _poisson(rate: float, seed: int) -> Iterator[float]:
    random = Random(f"arrivals {seed}")
    due_s = 0.0
    while True:
        due_s += random.expovariate(rate)
        yield due_s


def _at_speed(requests: Iterable[Request], speed: float) -> Iterator[Request]:
    first_s = None
    for request in requests:
        first_s = request.due_s if first_s is None else first_s
        yield request._replace(due_s=(request.due_s - first_s) / speed)


def _at_rate(requests: Iterable[Request], rate: float, bounds: Bounds) -> list[Request]:
    """Stretched so that the mean rate from the first request to the last one is `rate`."""
    limits = [] if bounds.num_requests is None else [bounds.num_requests]
    if bounds.seconds is not None:
        limits.append(max(1, math.floor(rate * bounds.seconds)))
    taken = list(islice(requests, min(limits, default=None)))
    if len(taken) < 2:
        return [request._replace(due_s=0.0) for request in taken]
    first_s, last_s = taken[0].due_s, taken[-1].due_s
    if last_s == first_s:
        raise WorkloadError(
            f"all {len(taken)} requests of the trace come at once: take more of it,"
            " or poisson or constant arrivals"
        )
    span_s, wanted_s = last_s - first_s, (len(taken) - 1) / rate
    return [r._replace(due_s=(r.due_s - first_s) / span_s * wanted_s) for r in taken]
