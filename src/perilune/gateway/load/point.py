"""Samples of one load as the points of a performance profile."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from perilune.gateway.load.level import Level
from perilune.gateway.load.percentiles import Percentiles, percentiles
from perilune.gateway.load.sample import Sample
from perilune.gateway.profiles import LoadPoint, Quantiles


def profile_points(samples: Sequence[Sample], level: Level) -> list[LoadPoint]:
    """First all lengths together, then one point for each power of two of prompt tokens."""
    ranges = list(_by_length(samples))
    points = [_point(samples, level)]
    if len(ranges) > 1:
        points += [_point(part, level) for part in ranges]
    return points


def _by_length(samples: Sequence[Sample]) -> Iterator[Sequence[Sample]]:
    """Ranges [2^k, 2^(k+1)), those with a sample in them, ascending."""
    parts: dict[int, list[Sample]] = {}
    for sample in samples:
        parts.setdefault(sample.num_prompt.bit_length(), []).append(sample)
    for length in sorted(parts):
        yield parts[length]


def _point(samples: Sequence[Sample], level: Level) -> LoadPoint:
    answered = [sample for sample in samples if sample.is_ok]
    timed = [sample for sample in samples if sample.is_ok or sample.is_censored]
    lengths = [sample.num_prompt for sample in samples]
    prompt_tokens = sum(sample.num_prompt for sample in answered)
    cached = [s.cached_tokens for s in answered if s.cached_tokens is not None]
    return LoadPoint(
        load=level.load,
        offered_rate=level.offered_rate,
        concurrency=level.mean_in_flight,
        min_prompt_tokens=min(lengths),
        max_prompt_tokens=max(lengths),
        num_requests=len(samples),
        failed=1 - len(answered) / len(samples),
        ttft_s=_quantiles(percentiles(sample.ttft_s for sample in timed)),
        tpot_s=_quantiles(percentiles(sample.tpot_s for sample in answered)),
        requests_per_s=len(answered) / level.elapsed_s,
        prompt_tokens_per_s=prompt_tokens / level.elapsed_s,
        output_tokens_per_s=sum(sample.num_output for sample in answered) / level.elapsed_s,
        cached=sum(cached) / prompt_tokens if cached and prompt_tokens else None,
    )


def _quantiles(found: Percentiles | None) -> Quantiles | None:
    if found is None:
        return None
    return Quantiles(p50=found.p50, p90=found.p90, p95=found.p95, p99=found.p99)
