"""Random schedules of the whole engine pass, and fail with a fault in it."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import schedules
from hypothesis import settings
from memory_machine import MemoryMachine

from perilune.engine.fake_pools import FakePools
from perilune.engine.pooled_memory import PooledMemory
from perilune.engine.prefix_cache import PrefixCache
from perilune.engine.scheduler import Scheduler

Plant = Callable[[pytest.MonkeyPatch], None]


def a_hit_writes_into_the_kept_state(patch: pytest.MonkeyPatch) -> None:
    """It takes over the slot, and what is there is copied to nobody."""
    patch.setattr(FakePools, "copy_slots", lambda self, pairs: None)


def a_partial_page_is_not_copied(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(FakePools, "copy_pages", lambda self, pairs: None)


def a_state_is_kept_under_one_token_more(patch: pytest.MonkeyPatch) -> None:
    publish = PrefixCache.publish

    def wrong(self, tokens, num_tokens, *rest):
        return publish(self, tokens, min(num_tokens + 1, len(tokens)), *rest)

    patch.setattr(PrefixCache, "publish", wrong)


def an_abort_keeps_what_a_step_is_still_writing(patch: pytest.MonkeyPatch) -> None:
    """As if the step had not begun."""
    release = PooledMemory.release

    def wrong(self, sequence):
        held = sequence.held
        can_keep = self.cache is not None and sequence.num_computed > 1
        if can_keep and held is not None and not held.checkpoints:
            sequence.num_computed -= 1
            self.keep(sequence)
        else:
            release(self, sequence)

    patch.setattr(PooledMemory, "release", wrong)


def what_is_preempted_goes_on_without_its_memory(patch: pytest.MonkeyPatch) -> None:
    """E12: as if a state could be had back."""
    preempt = Scheduler._preempt

    def wrong(self, sequence):
        num_computed = sequence.num_computed
        preempt(self, sequence)
        sequence.num_computed = num_computed

    patch.setattr(Scheduler, "_preempt", wrong)


def a_page_is_given_back_twice(patch: pytest.MonkeyPatch) -> None:
    release = PooledMemory.release

    def wrong(self, sequence):
        held = sequence.held
        release(self, sequence)
        if held is not None and held.pages and self.pages.count(held.pages[0]):
            self.pages.release(held.pages[:1])

    patch.setattr(PooledMemory, "release", wrong)


FAULTS: list[Plant] = [
    a_hit_writes_into_the_kept_state,
    a_partial_page_is_not_copied,
    a_state_is_kept_under_one_token_more,
    an_abort_keeps_what_a_step_is_still_writing,
    what_is_preempted_goes_on_without_its_memory,
    a_page_is_given_back_twice,
]


TestMemoryMachine = MemoryMachine.TestCase
TestMemoryMachine.settings = settings(max_examples=60, stateful_step_count=30, deadline=None)


@pytest.mark.parametrize("plant", FAULTS, ids=lambda plant: plant.__name__)
def test_a_planted_fault_is_found(plant: Plant, monkeypatch: pytest.MonkeyPatch) -> None:
    plant(monkeypatch)
    with pytest.raises((AssertionError, ValueError, IndexError)):
        schedules.run_all(range(40))


def test_without_one_the_same_schedules_pass() -> None:
    schedules.run_all(range(4))
