"""What one load did to the server, in numbers, and what it was held to."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from msgspec import Struct

from perilune.gateway.load.percentiles import Percentiles
from perilune.gateway.load.prefix_oracle import IdealHits
from perilune.gateway.load.scrape import MeasuredHits


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """What an answer has to keep, and what the generator has to keep."""

    slo_ttft_s: float | None = None
    slo_tpot_s: float | None = None
    """None in both: no goodput."""
    max_lag_s: float | None = None
    """None: a tenth of the median time to the first token, at least 10 ms."""


class Goodput(Struct, frozen=True, kw_only=True):
    """Requests within the objectives; a failed one is outside."""

    requests_per_s: float
    share: float


class Level(Struct, frozen=True, kw_only=True):
    """Times in seconds; latencies count from the time at which a request was due."""

    load: str
    marks: list[str]
    """What a reader has to know before believing the numbers."""
    trusted: bool
    """The generator kept its times, and there were answers."""
    num_requests: int
    num_ok: int
    failures: dict[str, int]
    """By status; `http 429` are those that stayed refused."""
    messages: dict[str, str]
    """Of each of these, one in the server's own words."""
    num_429: int
    """Refusals with Retry-After or without, also of requests that were answered later."""
    longest_retry_after_s: float | None
    num_left_out: int
    """Requests of the trace that the context does not hold."""
    elapsed_s: float
    offered_rate: float | None
    requests_per_s: float
    prompt_tokens_per_s: float
    output_tokens_per_s: float
    mean_in_flight: float
    max_in_flight: int
    ttft_s: Percentiles | None
    tpot_s: Percentiles | None
    gap_s: Percentiles | None
    """Between two pieces of a stream."""
    e2e_s: Percentiles | None
    prompt_tokens: Percentiles | None
    output_tokens: Percentiles | None
    asked_output_tokens: Percentiles | None
    goodput: Goodput | None
    lag_s: Percentiles | None
    """How late requests were sent."""
    loop_delay_s: Percentiles | None
    """How late the generator's event loop ran."""
    generator_cpu: float
    """Share of one core."""
    energy_j: dict[str, float]
    """By counter, of the machine the generator runs on."""
    ideal_hits: list[IdealHits]
    measured_hits: list[MeasuredHits]
    fingerprint: str | None


class Surroundings(Struct, frozen=True, kw_only=True):
    """What was seen beside the samples."""

    loop_delays_s: Sequence[float]
    cpu_s: float
    energy_j: dict[str, float]
    ideal_hits: list[IdealHits]
    metric_hits: MeasuredHits | None
    num_left_out: int
