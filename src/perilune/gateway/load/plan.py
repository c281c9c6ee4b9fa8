"""What a load test sends: its configuration, and the requests that follow from it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import Literal

from perilune.gateway.load.client import Endpoint
from perilune.gateway.load.errors import WorkloadError
from perilune.gateway.load.level import Limits
from perilune.gateway.load.prompts import END_ID, FIRST_ID
from perilune.gateway.load.traces import TracedRequest, read_trace
from perilune.gateway.load.workload import Bounds, Fitting, Load, fixed_lengths, scaled


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadTest:
    """Everything that decides what is sent, and when."""

    url: str
    model_id: str | None = None
    """None takes the first that the server offers."""
    endpoint: Endpoint = "completions"
    prompt_form: Literal["ids", "text"] = "ids"
    first_id: int = FIRST_ID
    end_id: int = END_ID
    trace: Path | None = None
    """None: every request has the two lengths below."""
    prompt_tokens: int = 512
    output_tokens: int = 64
    skip: int = 0
    """Requests of the trace that are passed over first."""
    scale_tokens: float = 1.0
    max_context: int | None = None
    """None: as the server's model card says."""
    loads: tuple[Load, ...]
    bounds: Bounds
    limits: Limits = field(default_factory=Limits)
    cache_tokens: int | None = None
    """Capacity for the ideal hit rates."""
    seed: int = 0
    num_warmup: int = 1
    timeout_s: float = 600.0
    max_retries: int = 0
    temperature: float = 1.0
    ignore_eos: bool = True
    hardware: str | None = None
    """What the server runs on, where that is not this machine."""


def workload_text(test: LoadTest) -> str:
    """One line: what is sent."""
    if test.trace is None:
        return f"{test.prompt_tokens} prompt tokens, {test.output_tokens} output tokens"
    scale = "" if test.scale_tokens == 1 else f", tokens times {test.scale_tokens:g}"
    skip = f", from request {test.skip}" if test.skip else ""
    return f"{test.trace.name}{skip}{scale}"


def requests_of(test: LoadTest) -> Fitting:
    """Those that fit the context, read as they are asked for; raises as `read_trace`."""
    scale = 1.0 if test.trace is None else test.scale_tokens
    return Fitting(scaled(_traced(test), scale), test.max_context)


def _traced(test: LoadTest) -> Iterator[TracedRequest]:
    if test.trace is None:
        if test.max_context and test.prompt_tokens + test.output_tokens > test.max_context:
            raise nothing_left(test)
        return fixed_lengths(test.prompt_tokens, test.output_tokens)
    return islice(read_trace(test.trace), test.skip, None)


def nothing_left(test: LoadTest) -> WorkloadError:
    what = workload_text(test)
    return WorkloadError(
        f"no request is left of {what}, with a context of {test.max_context} tokens"
    )
