"""What a reader has to know before believing the numbers of a level."""

from __future__ import annotations

from collections.abc import Sequence

from perilune.gateway.load.level import Limits
from perilune.gateway.load.percentiles import Percentiles
from perilune.gateway.load.prefix_oracle import IdealHits
from perilune.gateway.load.sample import Sample
from perilune.gateway.load.scrape import MeasuredHits

_LEAST_LAG_LIMIT_S = 0.01
_LAG_SHARE = 0.1
_FEW_REQUESTS = 100
_BACKLOG_GROWTH, _BACKLOG_SLACK = 1.5, 5
_HIT_ROUNDING = 0.01
"""Texts have other lengths for the server than for the oracle."""


def allowed_lag_s(limits: Limits, ttft: Percentiles | None) -> float:
    if limits.max_lag_s is not None:
        return limits.max_lag_s
    return max(_LEAST_LAG_LIMIT_S, _LAG_SHARE * ttft.p50 if ttft else 0.0)


def marks_of_lateness(
    lag: Percentiles | None, delay: Percentiles | None, allowed_s: float
) -> list[str]:
    return [
        f"{what} (p99 {late.p99 * 1e3:.1f} ms, allowed {allowed_s * 1e3:.1f} ms):"
        " its latencies are partly the generator's own"
        for what, late in (
            ("REFUSED: the generator sent late", lag),
            ("REFUSED: the generator's event loop was late", delay),
        )
        if late is not None and late.p99 > allowed_s
    ]


def marks_of(
    samples: Sequence[Sample], measured: Sequence[MeasuredHits], ideal: Sequence[IdealHits]
) -> list[str]:
    """All but those of lateness."""
    answered = [sample for sample in samples if sample.is_ok]
    num_given_up = sum(sample.is_censored for sample in samples)
    num_short = sum(s.num_output < s.request.output_tokens for s in answered)
    best = max((hits.rate for hits in ideal), default=1.0) + _HIT_ROUNDING
    early, late = _backlogs(samples)
    marks = {
        "REFUSED: no request was answered": not answered,
        f"{len(samples) - len(answered)} of {len(samples)} requests failed": (
            0 < len(answered) < len(samples)
        ),
        f"{num_given_up} requests were given up: TTFT and end to end take their waiting so far": (
            num_given_up > 0
        ),
        f"p99 is of {len(answered)} requests: with fewer than {_FEW_REQUESTS} it is the slowest": (
            0 < len(answered) < _FEW_REQUESTS
        ),
        f"{num_short} answers were shorter than asked for": num_short > 0,
        "the server gave no usage: output tokens are pieces of the stream": any(
            sample.output_tokens is None for sample in answered
        ),
        f"the server fell behind: {early} requests in flight half way, {late} at the last arrival;"
        " a longer run has longer latencies": late > _BACKLOG_GROWTH * early + _BACKLOG_SLACK,
        "more prefix hits than these requests hold: the cache was warm (take another --seed)": any(
            hits.source == "usage" and hits.rate > best for hits in measured
        ),
    }
    return [mark for mark, holds in marks.items() if holds]


def _backlogs(samples: Sequence[Sample]) -> tuple[int, int]:
    """Requests in flight when the middle one was due, and when the last one was."""
    due = sorted(sample.due_at for sample in samples)
    middle, last = (
        sum(s.due_at <= at and (s.ended_at is None or s.ended_at > at) for s in samples)
        for at in (due[len(due) // 2], due[-1])
    )
    return middle, last
