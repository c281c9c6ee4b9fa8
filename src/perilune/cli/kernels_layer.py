"""`perilune kernels bench layer`: layers of K3's widths, decoding and training."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import torch

from perilune.core.errors import UnsupportedError
from perilune.kernels.bench.ceilings import Ceilings
from perilune.kernels.bench.results import Row
from perilune.kernels.bench.rounds import Spread
from perilune.kernels.registry import OPS
from perilune.model.layer_bench import LayerStep, measure_layer
from perilune.model.parse_config import parse_config
from perilune.model.presets import kimi_k3
from perilune.model.stack_bench import Stack, measure_stack, peers_ops, with_experts

NAME = "layer"
KDA_LAYER, MLA_LAYER = 41, 43
"""In the middle of K3: five sources a read."""


class Case(NamedTuple):
    layer: int
    num_sequences: int
    context: int


CASES = {
    f"{kind}_B{n}": Case(layer, n, 8192)
    for kind, layer in (("KDA", KDA_LAYER), ("MLA_L8192", MLA_LAYER))
    for n in (1, 32, 128)
}
STACK = "KDA_MLA_T8192_backward"
STACK_TOKENS, STACK_EXPERTS = 8192, 112
PART_SECONDS = 0.1
"""Of the time of a case, for each op in it."""


def require(case: str | None, backend: str | None, device: str) -> None:
    """Raises:
    UnsupportedError: no such case, no GPU to hold it, or another backend than the model's own.
    """
    if backend not in (None, device):
        raise UnsupportedError(f"layers run what serves them on {device}, not {backend}")
    if case not in (None, STACK, *CASES):
        raise UnsupportedError(f"layer has no case {case}; it has {', '.join([*CASES, STACK])}")
    if device != "cuda":
        raise UnsupportedError("layers of K3's widths need a GPU with 40 GB")


def measured(
    case: str | None,
    device: torch.device,
    rates: Ceilings,
    seconds: float,
    commit: str | None,
    date: str,
) -> Iterator[tuple[str, list[Row]]]:
    """(case, its rows); `seconds` a case."""
    for name, sizes in CASES.items():
        if case in (None, name):
            yield name, _decoding(name, sizes, device, rates, seconds, commit, date)
    if case in (None, STACK):
        yield STACK, [_training(device, rates, seconds, commit, date)]


def _decoding(
    name: str,
    sizes: Case,
    device: torch.device,
    rates: Ceilings,
    seconds: float,
    commit: str | None,
    date: str,
) -> list[Row]:
    """The layer's row, and one of every op in it."""
    step = LayerStep(parse_config(kimi_k3()), *sizes, device, torch.bfloat16)
    times = measure_layer(step, device, rates, PART_SECONDS * seconds)
    whole = ("residual reads, attention, latent experts from MXFP4, shared experts", times.whole)
    parts = [("this op alone", part) for part in times.parts]
    return [
        _row(
            f"{name} {i:02} {timed.name}" if i else name,
            timed.spread,
            backend=device.type,
            floor_ms=1e3 * timed.floor_s,
            inside=inside,
            commit=commit,
            date=date,
        )
        for i, (inside, timed) in enumerate([whole, *parts])
    ]


def _training(
    device: torch.device, rates: Ceilings, seconds: float, commit: str | None, date: str
) -> Row:
    """Forward and backward of a KDA and an MLA layer, beside fla and plain PyTorch."""
    config = with_experts(parse_config(kimi_k3()), STACK_EXPERTS)
    stack = Stack(config, (KDA_LAYER, MLA_LAYER), STACK_TOKENS, device, torch.bfloat16)
    times = measure_stack(stack, peers_ops(set(OPS) - {"permute"}), rates, seconds)
    return _row(
        STACK,
        times.ours,
        backend=device.type,
        floor_ms=1e3 * times.floor_s,
        peer="fla and plain PyTorch",
        peer_median_ms=1e3 * times.peer.median,
        ratio=times.peer.median / times.ours.median,
        peer_error=times.difference,
        peer_note=f"error: gradients against ours; {STACK_EXPERTS} experts",
        inside="residual reads, attention, latent and shared experts in bf16, all gradients",
        commit=commit,
        date=date,
    )


def _row(case: str, spread: Spread, **rest: Any) -> Row:
    median_ms, p10_ms, p90_ms = (1e3 * s for s in spread)
    return Row(op=NAME, case=case, median_ms=median_ms, p10_ms=p10_ms, p90_ms=p90_ms, **rest)
