"""One size of one stack: its step in a graph, its kernels alone, and with the host's work."""

from __future__ import annotations

import math
import time
from collections import deque
from typing import Any, NamedTuple

import torch

from perilune.kernels.bench.contender import Contender, GraphContender
from perilune.kernels.bench.environment import gpu_id
from perilune.kernels.bench.gpu_state import Clocks, Sampler, summary
from perilune.kernels.bench.rounds import Settings, Spread, measure
from perilune.kernels.bench.stopwatch import stopwatch
from perilune.kernels.registry import recorded
from perilune.model.contexts.kernel_times import KernelTimes, kernel_times
from perilune.model.contexts.stacks import StackStep
from perilune.model.layer_bench import same_again

ROUND_S = 1e-2
"""Long enough that a synchronisation does not blur it."""
MOST_STEPS = 8
"""Of a round."""
AHEAD = 1
"""Steps that wait while one runs."""


class Measured(NamedTuple):
    step: Spread
    """Seconds of a step, replayed as a graph where there are graphs."""
    kernels: KernelTimes | None
    steady_s: float
    """A step on, with what the host does for the next one while this one runs."""
    clocks: Clocks | None
    finite: bool
    """What a step gives after all of that."""


def chosen_experts(step: StackStep) -> list[int]:
    """Different ones in each layer, of a step that is run for it."""
    with recorded() as calls:
        step()
    return [len(call.args[1].unique()) for call in calls if call.op == "experts_mxfp4"]


def measure_step(
    step: StackStep, device: torch.device, floor_s: float, settings: Settings
) -> Measured:
    """`floor_s`: what a step takes at least. As long again as the rounds take the card is warmed up
    before them, and sequences grow after them, half of it each."""
    on_gpu = device.type == "cuda"
    made = GraphContender if on_gpu else Contender
    repeats = min(MOST_STEPS, max(1, math.ceil(ROUND_S / floor_s))) if on_gpu else 1
    contender = made("a step", [step] * repeats)
    _warm(contender, settings.seconds / 2, device)
    with Sampler(gpu_id(device)) as sampler:
        measured = measure([contender], same_again, stopwatch(device), settings)
    spread = measured.spreads[0]
    one = contender if repeats == 1 else made("a step", [step])
    steady_s = _steady(step, one, max(4, int(settings.seconds / 2 / spread.median)), device)
    kernels = kernel_times(one.round, device)  # last: a profiler may stay in the way of launches
    finite = bool(torch.isfinite(step()).all())
    return Measured(spread, kernels, steady_s, summary(sampler.states), finite)


def _warm(contender: Contender, seconds: float, device: torch.device) -> None:
    """A cold card holds a higher clock, and would flatter whoever comes first."""
    end = time.perf_counter() + seconds
    while time.perf_counter() < end:
        contender.round()
        _wait(device)


def _steady(step: StackStep, one: Contender, count: int, device: torch.device) -> float:
    """Seconds a step: sequences grow by a token each time, up to their context. The host is no
    further ahead than an engine's, which makes the next step while one runs."""
    count = min(count, step.context)
    under_way: deque[Any] = deque()  # events
    step.load(step.context - count + 1)
    one.round()
    _wait(device)
    start = time.perf_counter()
    for num_tokens in range(step.context - count + 1, step.context + 1):
        step.load(num_tokens)
        one.round()
        if device.type == "cuda":
            under_way.append(torch.cuda.current_stream(device).record_event())
            if len(under_way) > AHEAD:
                under_way.popleft().synchronize()
    _wait(device)
    return (time.perf_counter() - start) / count


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
