"""The random schedules of `test_memory_machine` on graphs, and with a step launched ahead."""

from __future__ import annotations

import pytest
import schedules
from hypothesis import settings
from memory_machine import LateMachine, MachineOnGraphs, MachineThatRunsAhead, MemoryMachine

from perilune.engine.decode_buffers import DeviceBuffers, HostBuffer
from perilune.engine.decode_graphs import DecodeGraphs
from perilune.engine.scheduler import Scheduler

TestMachineOnGraphs = MachineOnGraphs.TestCase
TestMachineOnGraphs.settings = settings(max_examples=20, stateful_step_count=30, deadline=None)
TestMachineThatRunsAhead = MachineThatRunsAhead.TestCase
TestMachineThatRunsAhead.settings = settings(max_examples=40, stateful_step_count=30, deadline=None)
TestLateMachine = LateMachine.TestCase
TestLateMachine.settings = TestMachineThatRunsAhead.settings


def buffers_that_nobody_waits_for(patch: pytest.MonkeyPatch) -> None:
    """And one alone, which a step in flight still reads when the next one is written."""
    init = DecodeGraphs.__init__

    def wrong(self, *args):
        init(self, *args)
        self._buffers = [self._buffers[0]] * 2

    patch.setattr(DecodeGraphs, "__init__", wrong)
    no_wait = property(lambda self: lambda: None, lambda self, wait: None)
    patch.setattr(HostBuffer, "is_free", no_wait, raising=False)


def tables_that_stay_where_they_arrive(patch: pytest.MonkeyPatch) -> None:
    def wrong(self, host):
        *_, num_bytes = host.loaded
        self._travelled[:num_bytes].copy_(host.bytes_[:num_bytes])

    patch.setattr(DeviceBuffers, "take", wrong)


def a_token_of_the_row_beside_it(patch: pytest.MonkeyPatch) -> None:
    next_chunk = Scheduler._next_chunk
    patch.setattr(
        Scheduler,
        "_next_chunk",
        lambda self, sequence, source: next_chunk(self, sequence, max(source - 1, 0)),
    )


def what_is_sampled_is_lost_where_a_graph_is_captured(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(DeviceBuffers, "resume", lambda self: self.sampled_N.zero_())


@pytest.mark.parametrize(
    "plant",
    [
        buffers_that_nobody_waits_for,
        tables_that_stay_where_they_arrive,
        a_token_of_the_row_beside_it,
        what_is_sampled_is_lost_where_a_graph_is_captured,
    ],
    ids=lambda plant: plant.__name__,
)
def test_a_planted_fault_is_found(plant, monkeypatch: pytest.MonkeyPatch) -> None:
    plant(monkeypatch)
    with pytest.raises((AssertionError, ValueError, IndexError, KeyError)):
        schedules.run_all(range(40), LateMachine)


@pytest.mark.parametrize("kind", [MachineOnGraphs, MachineThatRunsAhead, LateMachine])
def test_without_one_the_same_schedules_pass(kind: type[MemoryMachine]) -> None:
    schedules.run_all(range(3), kind)
