"""The curves of a run as one PNG: loss, MaxVio and bits per byte over the steps."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

CURVE_FILE = "curve.png"
_GREY = "#999999"


def draw_curve(metrics: Sequence[Mapping[str, Any]], path: Path) -> None:
    """Draws the lines of `metrics.jsonl` to `path`."""
    figure = Figure(figsize=(9, 3), dpi=80, layout="constrained")
    loss, balance, score = figure.subplots(1, 3)
    for axes, title in ((loss, "training loss, nats a token"), (balance, "MaxVio, worst layer")):
        axes.set_title(title, fontsize=9)
        axes.set_xlabel("step", fontsize=8)
    _line(loss, metrics, "loss")
    _line(balance, metrics, "max_violation")
    balance.set_ylim(bottom=0)
    score.set_title("validation, bits per byte", fontsize=9)
    _draw_scores(score, [line for line in metrics if any(map(_is_score, line))])
    for axes in (loss, balance, score):
        axes.tick_params(labelsize=8)
        axes.grid(color=_GREY, alpha=0.3, linewidth=0.5)
    FigureCanvasAgg(figure).print_png(path)


def _line(axes: Any, metrics: Sequence[Mapping[str, Any]], key: str, **style: Any) -> None:
    points = [(line["step"], line[key]) for line in metrics if key in line]
    axes.plot([step for step, _ in points], [value for _, value in points], linewidth=1, **style)


def _draw_scores(axes: Any, metrics: Sequence[Mapping[str, Any]]) -> None:
    """Lines over the steps; bars, if there was one validation only."""
    keys = sorted({key for line in metrics for key in line if _is_score(key)})
    kinds = [key.removeprefix("bpb/") for key in keys]
    if len(metrics) == 1:
        axes.margins(y=0.15)
        axes.bar_label(axes.bar(kinds, [metrics[0][key] for key in keys]), fmt="%.2f", fontsize=8)
        return
    for key, kind in zip(keys, kinds, strict=True):
        _line(axes, metrics, key, marker="o", label=kind)
    if keys:
        axes.set_xlabel("step", fontsize=8)
        axes.legend(fontsize=8, frameon=False)


def _is_score(key: str) -> bool:
    return key.startswith("bpb/")
