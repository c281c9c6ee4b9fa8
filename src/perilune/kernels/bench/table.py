"""A result file as a Markdown table.

In a document: `cog.outl(markdown(Path("benchmarks/results/kernels_h200_202612.json")))`.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from perilune.kernels.bench.results import Row, describe, load

HEAD = (
    "op",
    "case",
    "backend",
    "median ms",
    "p10-p90",
    "floor ms",
    "x floor",
    "peer",
    "peer ms",
    "peer / ours",
    "remarks",
)


def markdown(path: Path) -> str:
    """Where it was measured, and a line a row."""
    env, rows = load(path)
    lines = [HEAD, tuple("---" for _ in HEAD), *(cells(row) for row in rows)]
    return "\n".join([describe(env), "", *(f"| {' | '.join(line)} |" for line in lines)])


def cells(row: Row) -> tuple[str, ...]:
    return (
        row.op,
        row.case,
        row.backend,
        _number(row.median_ms),
        f"{_number(row.p10_ms)}-{_number(row.p90_ms)}",
        _number(row.floor_ms),
        f"{row.median_ms / row.floor_ms:.1f}",
        row.peer or "",
        _number(row.peer_median_ms),
        f"{row.ratio:.2f}" if row.ratio is not None else "",
        remarks(row),
    )


def remarks(row: Row) -> str:
    eager = [f"in a graph; eager {_number(row.eager_ms)} ms"] if row.eager_ms is not None else []
    peer = [f"peer {row.peer_note}"] if row.peer_note else []
    return "; ".join([*eager, *row.marks, *peer])


def plain(rows: Sequence[Row]) -> str:
    """For a terminal: the same columns, aligned."""
    lines = [HEAD, *(cells(row) for row in rows)]
    widths = [max(len(line[i]) for line in lines) for i in range(len(HEAD))]
    return "\n".join(
        "  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip()
        for line in lines
    )


def _number(value: float | None) -> str:
    return "" if value is None else f"{value:.4g}"
