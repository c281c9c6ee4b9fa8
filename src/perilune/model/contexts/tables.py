"""A result file as Markdown, and the numbers that documents quote from it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

from perilune.kernels.bench.results import describe
from perilune.model.contexts.plan import ALL_MLA, GQA, HYBRID
from perilune.model.contexts.rows import DecodeRow, PrefillRow, ResultFile

GB = 1e9
STACK_NAMES = {HYBRID: "3 KDA + 1 MLA", ALL_MLA: "4 MLA", GQA: "4 GQA 8 x 128"}


class Ratio(NamedTuple):
    """Of decode throughputs."""

    measured: float
    roofline: float

    @property
    def of_roofline(self) -> float:
        return self.measured / self.roofline


def ratio(rows: Sequence[DecodeRow], stack: str, context: int, batch: int | None) -> Ratio | None:
    """The hybrid's throughput over that of `stack`; None where one of both is not there.

    `batch`: of both; None: as many sequences as fit, each.
    """

    def find(name: str) -> DecodeRow | None:
        of_stack = (row for row in rows if (row.stack, row.context) == (name, context))
        fits = (r for r in of_stack if (r.is_full if batch is None else r.num_sequences == batch))
        return next(fits, None)

    ours, other = find(HYBRID), find(stack)
    if ours is None or other is None:
        return None
    return Ratio(
        ours.tokens_per_s / other.tokens_per_s,
        ours.num_sequences / ours.floor_ms / (other.num_sequences / other.floor_ms),
    )


def decode_table(rows: Sequence[DecodeRow], batch: int | None = None) -> str:
    """Of one batch, or of caches that are full. Steps one after another are with the host's work
    for each, which a yardstick is spared; their kernels are those of a step, without gaps."""
    shown = [r for r in rows if (r.is_full if batch is None else r.num_sequences == batch)]
    shown.sort(key=lambda row: (row.context, [*STACK_NAMES].index(row.stack)))
    columns: dict[str, Callable[[DecodeRow], str]] = {
        "context": lambda r: f"{r.context:,}",
        "four layers": lambda r: STACK_NAMES[r.stack],
        "sequences": lambda r: f"{r.num_sequences:,}",
        "cache": lambda r: f"{r.cache_bytes / GB:.1f} GB",
        "step, p10 to p90": lambda r: f"{r.step_ms:.2f} ms, {r.p10_ms:.2f} to {r.p90_ms:.2f}",
        "tokens/s": lambda r: f"{r.tokens_per_s:,.0f}",
        "of the roofline": lambda r: f"{r.of_roofline:.0%}",
        "one after another": lambda r: f"{r.steady_ms:.2f} ms",
        "over their kernels": lambda r: f"{r.steady_ms / r.kernels_ms:.2f}" if r.kernels_ms else "",
    }
    return _markdown(list(columns), [[show(row) for show in columns.values()] for row in shown])


def ratio_table(rows: Sequence[DecodeRow], batch: int | None = None) -> str:
    """The hybrid's throughput over the others', context by context."""
    head, lines = ["context"], []
    for stack in (ALL_MLA, GQA):
        head += [f"over {STACK_NAMES[stack]}", "roofline", "reached"]
    for context in sorted({row.context for row in rows}):
        found = [ratio(rows, stack, context, batch) for stack in (ALL_MLA, GQA)]
        if any(found):
            lines.append([f"{context:,}", *(cell for each in found for cell in _cells(each))])
    return _markdown(head, lines)


def prefill_table(rows: Sequence[PrefillRow]) -> str:
    head = ["tokens", "chunk", "time", "tokens/s", "of its products' floor"]
    head += ["first and last chunk", "weights", "cache", "peak"]
    return _markdown(
        head,
        [
            [
                f"{row.context:,}",
                f"{row.chunk:,}",
                f"{row.seconds:.1f} s",
                f"{row.tokens_per_s:,.0f}",
                f"{row.floor_s / row.seconds:.0%}",
                f"{row.first_chunk_ms:.0f} ms, {row.last_chunk_ms:.0f} ms",
                f"{row.weight_bytes / GB:.1f} GB",
                f"{row.cache_bytes / GB:.2f} GB",
                "" if row.peak_bytes is None else f"{row.peak_bytes / GB:.1f} GB",
            ]
            for row in rows
        ],
    )


def batches(rows: Sequence[DecodeRow]) -> list[int]:
    """Those at which the hybrid was measured beside another stack, of the same context."""
    return sorted(
        {
            row.num_sequences
            for row in rows
            for stack in (ALL_MLA, GQA)
            if ratio(rows, stack, row.context, row.num_sequences)
        }
    )


def report(results: ResultFile) -> str:
    """Everything, as Markdown."""
    env, decode, prefill = results
    rates = env["ceilings"]
    copy, matmul = rates["bytes_per_s"] / 1e12, rates["flops_per_s"] / 1e12
    parts = [
        describe(env),
        f"Ceilings: copy {copy:.2f} TB/s, matrix product {matmul:.0f} TFLOP/s.",
    ]
    if decode:
        budget = f"{decode[0].budget_bytes / GB:g} GB"
        parts += [f"As many sequences as {budget} of cache hold:", decode_table(decode)]
        parts += ["Throughput of the hybrid:", ratio_table(decode)]
        for batch in batches(decode):
            parts += [f"{batch} sequences each:", decode_table(decode, batch)]
            parts.append(ratio_table(decode, batch))
        parts += ["Ways to attend of the yardstick, ms a layer:", _ways_table(decode)]
    if prefill:
        parts += ["Prefill of one sequence in chunks:", prefill_table(prefill)]
    return "\n\n".join(parts)


def _ways_table(rows: Sequence[DecodeRow]) -> str:
    tried = [row for row in rows if row.attention_ms]
    names = list(dict.fromkeys(name for row in tried for name in row.attention_ms))
    lines = [
        [f"{row.context:,}", str(row.num_sequences), *(_way(row, name) for name in names)]
        for row in tried
    ]
    return _markdown(["context", "sequences", *names], lines)


def _way(row: DecodeRow, name: str) -> str:
    took = row.attention_ms.get(name, "")
    text = took if isinstance(took, str) else f"{took:.3f}"
    return f"**{text}**" if name == row.attention else text


def _cells(found: Ratio | None) -> list[str]:
    if found is None:
        return ["", "", ""]
    return [f"{found.measured:.2f}", f"{found.roofline:.2f}", f"{found.of_roofline:.0%}"]


def _markdown(head: Sequence[str], lines: Sequence[Sequence[str]]) -> str:
    rows = [head, ["---:"] * len(head), *lines]
    return "\n".join(f"| {' | '.join(row)} |" for row in rows)
