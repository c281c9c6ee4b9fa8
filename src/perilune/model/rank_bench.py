"""Layers and the head shared by ranks, compared with those of one GPU and timed beside them.

In graphs where there are graphs, in turns. All ranks make the same calls, so that the number of
rounds is fixed.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from perilune.kernels.bench.cases import bench
from perilune.kernels.bench.ceilings import Ceilings
from perilune.kernels.bench.contender import Contender, GraphContender
from perilune.kernels.bench.floors import least_seconds
from perilune.kernels.bench.rounds import Settings, Spread, measure
from perilune.kernels.bench.stopwatch import stopwatch
from perilune.kernels.registry import recorded
from perilune.model.config import ModelConfig
from perilune.model.layer_bench import inputs_of, require_green, same_again
from perilune.model.rank_pairs import BOUNDS, Equality, HeadPair, LayerPair
from perilune.model.ranks import Ranks

CALLS = 16
"""Of a step in a graph: ranks start it some microseconds apart."""


class Joint(NamedTuple):
    """A call that joins ranks, alone."""

    name: str
    num_bytes: int
    """Of its result."""
    spread: Spread


class Times(NamedTuple):
    shared: Spread
    alone: Spread
    joints: list[Joint]
    floor_s: float
    """Of the rank's own ops; the joints are not in it."""

    @property
    def expected_s(self) -> float:
        return self.floor_s + sum(joint.spread.median for joint in self.joints)


class Case(NamedTuple):
    name: str
    layer: int | None
    """None: the head."""
    num_sequences: int


@dataclass(frozen=True, kw_only=True)
class Measured:
    case: Case
    equality: dict[str, Equality]
    """By dtype."""
    times: Times
    equal: bool


def planned(config: ModelConfig, batch: Sequence[int]) -> list[Case]:
    """A KDA and an MLA layer from the middle of the stack, and the head, by number of sequences."""
    of_experts = [i for i in range(config.num_layers) if config.is_moe(i)]
    kinds: dict[str, int | None] = {}
    for name, is_mla in (("KDA", False), ("MLA", True)):
        layers = [i for i in of_experts if config.is_mla(i) == is_mla]
        kinds[name] = layers[len(layers) // 2]
    kinds["head"] = None
    return [Case(f"{name}_B{n}", layer, n) for name, layer in kinds.items() for n in batch]


@dataclass(frozen=True, kw_only=True)
class RankBench:
    """One rank's; all make the same calls."""

    config: ModelConfig
    context: int
    ranks: Ranks
    device: torch.device
    rates: Ceilings
    rounds: int
    checked: bool
    """Whether the conformance of every op comes first."""

    def measure(self, case: Case) -> Measured:
        """Compares in fp32, and on a GPU in bf16, which is then timed.

        Raises:
            RefusedError: an op is red.
        """
        dtypes = [torch.float32, *[torch.bfloat16] * (self.device.type == "cuda")]
        equality = {}
        for dtype in dtypes[:-1]:
            equality[dtype] = self._pair(case, dtype).compare()
        pair = self._pair(case, dtypes[-1])
        equality[dtypes[-1]] = pair.compare()
        return Measured(
            case=case,
            equality={str(dtype).rpartition(".")[2]: each for dtype, each in equality.items()},
            times=self._times(pair),
            equal=all(e.alike and e.error <= BOUNDS[dtype] for dtype, e in equality.items()),
        )

    def _pair(self, case: Case, dtype: torch.dtype) -> LayerPair | HeadPair:
        place = self.ranks, self.device, dtype
        if case.layer is None:
            return HeadPair(self.config, case.num_sequences, *place)
        return LayerPair(self.config, case.layer, case.num_sequences, self.context, *place)

    def _times(self, pair: LayerPair | HeadPair) -> Times:
        """Both in turns, and the joints alone."""
        with torch.inference_mode(), recorded() as calls:
            pair.shared()
        if self.checked:
            require_green(calls)
        floors = [least_seconds(bench(c.op).work(inputs_of(c), False), self.rates) for c in calls]
        joints = [
            Joint(name, call().nbytes, self._timed(call)[0]) for name, call in pair.joints().items()
        ]
        shared, alone = self._timed(pair.shared, pair.alone)
        return Times(shared, alone, joints, sum(floors))

    def _timed(self, *calls: Callable[[], Any]) -> list[Spread]:
        kind = GraphContender if self.device.type == "cuda" else Contender
        settings = Settings(min_rounds=self.rounds, max_rounds=self.rounds)
        contenders = [kind(str(i), [call] * CALLS) for i, call in enumerate(calls)]
        dist.barrier(self.ranks.group)
        return measure(contenders, same_again, stopwatch(self.device), settings).spreads
