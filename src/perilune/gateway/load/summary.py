"""The samples of a run as a level."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

from perilune.gateway.load.level import Goodput, Level, Limits, Surroundings
from perilune.gateway.load.marks import allowed_lag_s, marks_of, marks_of_lateness
from perilune.gateway.load.percentiles import percentiles
from perilune.gateway.load.sample import Sample
from perilune.gateway.load.scrape import MeasuredHits
from perilune.gateway.load.workload import Load


def summed_up(samples: Sequence[Sample], load: Load, limits: Limits, seen: Surroundings) -> Level:
    """The level of at least one sample."""
    answered = [sample for sample in samples if sample.is_ok]
    # A request that was given up has waited: without it the slowest ones would be missing.
    timed = [sample for sample in samples if sample.is_ok or sample.is_censored]
    start = min(sample.due_at for sample in samples)
    elapsed_s = max(sample.ended_at or sample.due_at for sample in samples) - start
    per_s = _PerSecond(elapsed_s)
    measured = [hits for hits in (_usage_hits(answered), seen.metric_hits) if hits is not None]
    retry_after = [s.retry_after_s for s in samples if s.retry_after_s is not None]
    failures = _failures(samples)
    ttft, lag = percentiles(s.ttft_s for s in timed), percentiles(s.lag_s for s in samples)
    delay = percentiles(seen.loop_delays_s)
    allowed_s = allowed_lag_s(limits, ttft)
    is_late = any(late is not None and late.p99 > allowed_s for late in (lag, delay))
    return Level(
        load=str(load),
        marks=[
            *marks_of_lateness(lag, delay, allowed_s),
            *marks_of(samples, measured, seen.ideal_hits),
        ],
        trusted=bool(answered) and not is_late,
        num_requests=len(samples),
        num_ok=len(answered),
        failures=failures,
        messages=_messages(samples),
        num_429=sum(sample.num_429 for sample in samples),
        longest_retry_after_s=max(retry_after, default=None),
        num_left_out=seen.num_left_out,
        elapsed_s=elapsed_s,
        offered_rate=None if load.arrivals == "closed" else _offered_rate(samples),
        requests_per_s=per_s(len(answered)),
        prompt_tokens_per_s=per_s(sum(sample.num_prompt for sample in answered)),
        output_tokens_per_s=per_s(sum(sample.num_output for sample in answered)),
        mean_in_flight=per_s(math.fsum(sample.e2e_s or 0.0 for sample in samples)),
        max_in_flight=_max_in_flight(samples),
        ttft_s=ttft,
        tpot_s=percentiles(sample.tpot_s for sample in answered),
        gap_s=percentiles(gap for sample in answered for gap in sample.gaps_s),
        e2e_s=percentiles(sample.e2e_s for sample in timed),
        prompt_tokens=percentiles(sample.num_prompt for sample in answered),
        output_tokens=percentiles(sample.num_output for sample in answered),
        asked_output_tokens=percentiles(s.request.output_tokens for s in answered),
        goodput=_goodput(samples, limits, per_s),
        lag_s=lag,
        loop_delay_s=delay,
        generator_cpu=per_s(seen.cpu_s),
        energy_j=seen.energy_j,
        ideal_hits=seen.ideal_hits,
        measured_hits=measured,
        fingerprint=next((s.fingerprint for s in answered if s.fingerprint), None),
    )


class _PerSecond:
    def __init__(self, elapsed_s: float) -> None:
        self.elapsed_s = elapsed_s

    def __call__(self, amount: float) -> float:
        return amount / self.elapsed_s if self.elapsed_s > 0 else 0.0


def _offered_rate(samples: Sequence[Sample]) -> float | None:
    due = [sample.due_at for sample in samples]
    span_s = max(due) - min(due)
    return (len(due) - 1) / span_s if span_s > 0 else None


def _max_in_flight(samples: Iterable[Sample]) -> int:
    changes = [
        change
        for sample in samples
        if sample.sent_at is not None and sample.ended_at is not None
        for change in ((sample.sent_at, 1), (sample.ended_at, -1))
    ]
    now = most = 0
    for _, change in sorted(changes):
        now += change
        most = max(most, now)
    return most


def _failures(samples: Iterable[Sample]) -> dict[str, int]:
    counts: dict[str, int] = {}
    for sample in samples:
        if not sample.is_ok:
            counts[sample.status] = counts.get(sample.status, 0) + 1
    return dict(sorted(counts.items()))


def _messages(samples: Iterable[Sample]) -> dict[str, str]:
    messages: dict[str, str] = {}
    for sample in samples:
        if not sample.is_ok and sample.message:
            messages.setdefault(sample.status, sample.message)
    return messages


def _usage_hits(answered: Iterable[Sample]) -> MeasuredHits | None:
    told = [s for s in answered if s.cached_tokens is not None and s.prompt_tokens is not None]
    if not told:
        return None
    return MeasuredHits(
        source="usage",
        hit_tokens=sum(sample.cached_tokens or 0 for sample in told),
        prompt_tokens=sum(sample.num_prompt for sample in told),
    )


def _goodput(samples: Sequence[Sample], limits: Limits, per_s: _PerSecond) -> Goodput | None:
    if limits.slo_ttft_s is None and limits.slo_tpot_s is None:
        return None
    num_good = sum(_is_good(sample, limits) for sample in samples)
    return Goodput(requests_per_s=per_s(num_good), share=num_good / len(samples))


def _is_good(sample: Sample, limits: Limits) -> bool:
    """An answer of one token has no time per further token that could be too long."""
    return (
        sample.is_ok
        and (sample.ttft_s or 0.0) <= (math.inf if limits.slo_ttft_s is None else limits.slo_ttft_s)
        and (sample.tpot_s or 0.0) <= (math.inf if limits.slo_tpot_s is None else limits.slo_tpot_s)
    )
