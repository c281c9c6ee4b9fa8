"""All sizes of a plan, one after the other: weights once a stack, caches once a size."""

from __future__ import annotations

import gc
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch

from perilune.kernels.bench.ceilings import Ceilings
from perilune.kernels.bench.rounds import Settings
from perilune.kernels.bench.subject import choose, require_green
from perilune.kernels.registry import resolved, spec
from perilune.model.config import ModelConfig
from perilune.model.contexts.measure import Measured, chosen_experts, measure_step
from perilune.model.contexts.plan import GQA, PREFILL_CHUNK, Case, cache_bytes, capacity
from perilune.model.contexts.prefill import prefill
from perilune.model.contexts.roofline import (
    expected_experts,
    prefill_flops,
    roofline,
    weight_bytes,
)
from perilune.model.contexts.rows import DecodeRow, PrefillRow
from perilune.model.contexts.stacks import GQAStep, PooledStep, random_layers
from perilune.model.model import DecoderLayer

PREFILL_OPS = frozenset({"causal_conv", "kda_chunk", "gated_rms_norm", "mla_prefill"})
"""That only a prefill calls."""
OTHER_OPS = frozenset({"experts", "permute"})
"""That serve other weights."""


class Failed(NamedTuple):
    case: Case
    why: str


@dataclass(frozen=True, kw_only=True)
class Bench:
    config: ModelConfig
    device: torch.device
    dtype: torch.dtype
    rates: Ceilings
    budget_bytes: int
    """Of cache."""
    settings: Settings
    """Of the rounds of a case."""
    deadline_s: float
    """By `time.monotonic`: no case begins later."""
    commit: str | None
    date: str
    marks: list[str] = field(default_factory=list)

    def rows(self, plan: Sequence[Case]) -> Iterator[DecodeRow | PrefillRow | Failed]:
        """One a case, as soon as it is there. What fails is said, and the rest goes on."""
        layers: list[DecoderLayer] = []
        stack = None
        for case in plan:
            if time.monotonic() > self.deadline_s:
                yield Failed(case, "no time was left to begin it")
                continue
            try:
                if case.stack != stack:
                    stack, layers = None, []
                    self._free()
                    layers = random_layers(self.config, case.stack, self._generator(), self.dtype)
                    stack = case.stack
                row = (
                    self._prefilled(layers, case)
                    if case.is_prefill
                    else self._decoded(layers, case)
                )
            except Exception as error:  # of one case: the others' numbers cost minutes of a GPU
                row = Failed(case, f"{type(error).__name__}: {error}")
                stack, layers = None, []  # they may hold on to a cache
            self._free()
            yield row

    def _decoded(self, layers: Sequence[DecoderLayer], case: Case) -> DecodeRow:
        stack, context, n = case
        told = context, n, self._generator(), self.dtype
        step: PooledStep | GQAStep
        if stack == GQA:
            step = GQAStep(self.config, layers, *told)
        else:
            step = PooledStep(self.config, stack, layers, *told)
        chosen = chosen_experts(step)
        floors = roofline(self.config, stack, layers, n, context, chosen).seconds(self.rates)
        times = measure_step(step, self.device, sum(floors.values()), self.settings)
        ways, kernels, clocks = step.attention, times.kernels, times.clocks
        row = DecodeRow(
            stack=stack,
            context=context,
            num_sequences=n,
            is_full=n == capacity(self.config, stack, context, self.budget_bytes),
            budget_bytes=self.budget_bytes,
            step_ms=1e3 * times.step.median,
            p10_ms=1e3 * times.step.p10,
            p90_ms=1e3 * times.step.p90,
            floor_ms=1e3 * sum(floors.values()),
            floor_parts_ms=_in_ms(floors),
            steady_ms=1e3 * times.steady_s,
            kernels_ms=None if kernels is None else 1e3 * kernels.busy_s,
            largest_kernels_ms={} if kernels is None else _in_ms(kernels.largest),
            cache_bytes=step.cache_bytes,
            info_bytes=n * cache_bytes(self.config, stack, context),
            weight_bytes=weight_bytes(layers),
            peak_bytes=self._peak_bytes(),
            experts_chosen=chosen,
            experts_expected=expected_experts(self.config, n),
            attention="the registry's mla_decode" if ways is None else ways.name,
            attention_ms={} if ways is None else _in_ms(ways.tried),
            clocks=None if clocks is None else {k: list(v) for k, v in clocks._asdict().items()},
            marks=[*self.marks, *_odd(times)],
            commit=self.commit,
            date=self.date,
        )
        if isinstance(step, GQAStep):
            step.free()
        return row

    def _prefilled(self, layers: Sequence[DecoderLayer], case: Case) -> PrefillRow:
        sizes = case.context, PREFILL_CHUNK
        done = prefill(self.config, layers, *sizes, self._generator(), self.dtype)
        return PrefillRow(
            stack=case.stack,
            context=case.context,
            chunk=case.context // len(done.chunk_s),
            seconds=done.seconds,
            floor_s=prefill_flops(self.config, layers, case.context) / self.rates.flops_per_s,
            first_chunk_ms=1e3 * done.chunk_s[0],
            last_chunk_ms=1e3 * done.chunk_s[-1],
            finite=done.finite,
            cache_bytes=done.cache_bytes,
            weight_bytes=weight_bytes(layers),
            peak_bytes=self._peak_bytes(),
            commit=self.commit,
            date=self.date,
        )

    def _generator(self) -> torch.Generator:
        return torch.Generator(self.device).manual_seed(1)

    def _free(self) -> None:
        gc.collect()
        if self.device.type == "cuda":
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats(self.device)

    def _peak_bytes(self) -> int | None:
        on_gpu = self.device.type == "cuda"
        return torch.cuda.max_memory_reserved(self.device) if on_gpu else None


def _odd(times: Measured) -> list[str]:
    moved = times.clocks is not None and times.clocks.moved
    return [
        *([] if times.finite else ["outputs are not finite"]),
        *([f"clock moved: {times.clocks}"] if moved else []),
    ]


def ops_of(plan: Sequence[Case]) -> set[str]:
    """What the model calls in these cases."""
    prefills = any(case.is_prefill for case in plan)
    return set(resolved()) - OTHER_OPS - (set() if prefills else PREFILL_OPS)


def require_green_ops(device: torch.device, plan: Sequence[Case]) -> None:
    """Raises:
    RedOpError: an op that is going to be timed fails its conformance.
    """
    for op in sorted(ops_of(plan)):
        require_green(spec(op), choose(spec(op), device.type, None).backend)


def _in_ms(seconds: Mapping[str, Any]) -> dict[str, Any]:
    return {k: 1e3 * v if isinstance(v, float) else v for k, v in seconds.items()}
