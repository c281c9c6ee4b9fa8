"""A load test's result as Markdown."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from perilune.gateway.load.level import Level
from perilune.gateway.load.measure import LoadResult
from perilune.gateway.load.percentiles import Percentiles


def markdown(result: LoadResult) -> str:
    """A heading, then a table and a list for each load."""
    parts = [
        f"# {result.model} at {result.config['url']}",
        f"{result.workload}; seed {result.config['seed']}; {result.started_at}; {result.hardware}",
        *(_level(level, result) for level in result.levels),
    ]
    return "\n\n".join(parts)


def _level(level: Level, result: LoadResult) -> str:
    marks = "\n".join(f"- **{mark}**" for mark in level.marks)
    facts = "\n".join(f"- {fact}" for fact in _facts(level, result))
    lists = "\n".join(filter(None, (marks, facts)))
    return f"## {level.load}\n\n{_times(level)}\n\n{lists}"


def _times(level: Level) -> str:
    rows: Mapping[str, Percentiles | None] = {
        "time to first token": level.ttft_s,
        "time per output token": level.tpot_s,
        "between pieces": level.gap_s,
        "end to end": level.e2e_s,
        "sent late": level.lag_s,
    }
    head = "| ms | mean | p50 | p90 | p95 | p99 | max |\n|---|---|---|---|---|---|---|"
    return "\n".join([head, *(_row(name, row) for name, row in rows.items() if row is not None)])


def _row(name: str, found: Percentiles) -> str:
    times = (found.mean, found.p50, found.p90, found.p95, found.p99, found.max)
    return f"| {name} | {' | '.join(_ms(time_s) for time_s in times)} |"


def _ms(time_s: float) -> str:
    return f"{time_s * 1e3:,.1f}" if time_s < 1 else f"{time_s * 1e3:,.0f}"


def _facts(level: Level, result: LoadResult) -> Iterator[str]:
    yield _requests(level)
    offered = "" if level.offered_rate is None else f"offered {level.offered_rate:.3g}/s, "
    yield (
        f"{offered}answered {level.requests_per_s:.3g}/s, {level.prompt_tokens_per_s:,.0f} prompt"
        f" and {level.output_tokens_per_s:,.1f} output tokens/s; in flight"
        f" {level.mean_in_flight:.1f} on average, {level.max_in_flight} at most"
    )
    if level.prompt_tokens and level.output_tokens:
        prompt, output = level.prompt_tokens, level.output_tokens
        yield (
            f"prompts of {prompt.mean:,.0f} tokens (p50 {prompt.p50:,.0f}, max {prompt.max:,.0f}),"
            f" answers of {output.mean:,.0f} (p50 {output.p50:,.0f}, max {output.max:,.0f})"
        )
    if level.goodput:
        yield (
            f"goodput {level.goodput.requests_per_s:.3g}/s: {level.goodput.share:.1%} within"
            f" {_objectives(result)}"
        )
    yield from _hits(level)
    yield _energy(level, result)
    delay = level.loop_delay_s
    late = f", its event loop late by {_ms(delay.p99)} ms (p99)" if delay else ""
    yield f"the generator used {level.generator_cpu:.0%} of a core{late}"


def _requests(level: Level) -> str:
    parts = [f"{level.num_ok} of {level.num_requests} requests answered in {level.elapsed_s:.1f} s"]
    parts += [f"{count} {status}" for status, count in level.failures.items()]
    if level.num_429:
        told = level.longest_retry_after_s
        wait = "without Retry-After" if told is None else f"Retry-After up to {told:g} s"
        parts.append(f"refused {level.num_429} times with 429, {wait}")
    if level.num_left_out:
        parts.append(f"{level.num_left_out} left out, too long for the context")
    said = "".join(f' ("{message}")' for message in level.messages.values())
    return ", ".join(parts) + said


def _objectives(result: LoadResult) -> str:
    limits = result.config["limits"]
    named = (("TTFT", limits["slo_ttft_s"]), ("TPOT", limits["slo_tpot_s"]))
    return ", ".join(f"{name} {limit * 1e3:g} ms" for name, limit in named if limit is not None)


def _hits(level: Level) -> Iterator[str]:
    ideal = [
        f"{hits.rate:.1%} {hits.policy}"
        + ("" if hits.capacity_tokens is None else f" at {hits.capacity_tokens:,} tokens")
        for hits in level.ideal_hits
    ]
    measured = [f"{hits.rate:.1%} by {hits.source}" for hits in level.measured_hits]
    yield f"prefix hits: ideal {', '.join(ideal)}; measured {', '.join(measured) or 'nothing'}"


def _energy(level: Level, result: LoadResult) -> str:
    if not level.energy_j:
        return f"energy: none ({'; '.join(result.energy_missing)})"
    total = sum(level.energy_j.values())
    tokens = level.output_tokens_per_s * level.elapsed_s
    each = f", {total / tokens:.3g} J per output token" if tokens else ""
    parts = ", ".join(f"{name} {joules:,.0f} J" for name, joules in level.energy_j.items())
    return f"energy of this machine: {parts}{each}"
