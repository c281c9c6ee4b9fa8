"""Sequences that share, lose and regain memory, against an oracle that runs one at a time.

Pools are so small that sequences are preempted and cached prefixes evicted all the time. The fake
model raises where a slot or a page is not what its sequence computed; freed memory is poisoned.
"""

from __future__ import annotations

import tempfile
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from random import Random
from typing import ClassVar

import numpy as np
import pytest
import torch
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule
from torch import Tensor

from perilune.core.errors import OverloadedError
from perilune.core.types import EngineInfo, SamplingParams, TokenRequest
from perilune.engine.admission import admit
from perilune.engine.cache_files import CacheFiles
from perilune.engine.core import EngineCore
from perilune.engine.cost_model import CostModel
from perilune.engine.disk_tier import DiskTier
from perilune.engine.errors import PoolFullError
from perilune.engine.fake_card_memory import LateExecutor
from perilune.engine.fake_drafter import FakeDrafter
from perilune.engine.fake_lane import LateLane, on_lane
from perilune.engine.fake_model import FakeModel
from perilune.engine.fake_pools import FakePools
from perilune.engine.fake_pools_memory import FakePoolsMemory
from perilune.engine.lane import HostLane, Lane
from perilune.engine.off_card import OffCard
from perilune.engine.pooled_memory import Room
from perilune.engine.retention import Retention
from perilune.engine.sequence import TokenSequence

INFO = EngineInfo(model_id="fake", vocab_size=16, max_context=60, eos_ids=frozenset({3}))
PAGE = 4
RARE = st.integers(0, 30)
"""One of those that are open, or nobody: what ends them too often hides what they leave."""
COST = CostModel(token_flops=1e6, pair_flops=10.0, row_bytes=8, state_bytes=64)


@dataclass(eq=False)
class Expected:
    sequence: TokenSequence
    prompt: list[int]
    limit: int
    out: list[int] = field(default_factory=list)


class BreakingModel(FakeModel):
    """Its logits after some histories are NaN."""

    def __init__(self) -> None:
        super().__init__(INFO.vocab_size, PAGE)
        self.broken: set[tuple[int, ...]] = set()

    def logits(self, ids: Sequence[int]) -> Tensor:
        row_V = super().logits(ids)
        return row_V * torch.nan if tuple(ids) in self.broken else row_V


class MemoryOnLane(FakePoolsMemory):
    """Copies see what was enqueued before them."""

    def __init__(self, lane: Lane, pools: FakePools) -> None:
        super().__init__(pools)
        self._lane = lane

    def read_pages(self, pages: Sequence[int], out: np.ndarray) -> None:
        self._lane.mark()()
        super().read_pages(pages, out)

    def read_state(self, slot: int, out: np.ndarray) -> None:
        self._lane.mark()()
        super().read_state(slot, out)

    def write_pages(self, pages: Sequence[int], source: np.ndarray) -> None:
        self._lane.mark()()
        super().write_pages(pages, source)

    def write_state(self, slot: int, source: np.ndarray) -> None:
        self._lane.mark()()
        super().write_state(slot, source)


class MemoryMachine(RuleBasedStateMachine):
    counted: ClassVar[Counter[str]] = Counter()
    """What all runs have been through."""

    graphs = run_ahead = is_late = False

    def new_lane(self) -> Lane:
        return HostLane()

    @initialize(
        pages=st.sampled_from([24, 14, 8]),
        slots=st.sampled_from([1, 3, 6, 9, 12]),
        budget=st.sampled_from([16, 7, 1]),
        interval=st.sampled_from([0, 3, 8]),
        is_caching=st.sampled_from([True, True, True, False]),
        host_bytes=st.sampled_from([0, 200, 1000]),
        disk_bytes=st.sampled_from([0, 2500]),
        guesses=st.one_of(st.none(), st.integers(0, 2**32)),
    )
    def open(
        self,
        pages: int,
        slots: int,
        budget: int,
        interval: int,
        is_caching: bool,
        host_bytes: int,
        disk_bytes: int,
        guesses: int | None,
    ) -> None:
        self.thread = LateExecutor()
        self.folder = tempfile.TemporaryDirectory()
        self.model = BreakingModel()
        self.drafter = None
        if guesses is not None:
            draw = Random(guesses)
            self.drafter = FakeDrafter(self.model, lambda most: draw.randint(0, most))
        self.lane = lane = self.new_lane()
        self.core = EngineCore(
            self.model,
            room=Room(pages, slots),
            cost=COST if is_caching else None,
            retention=Retention(interval=interval, min_gap=2),
            tiers=partial(self.tiers, host_bytes, disk_bytes) if host_bytes else None,
            drafter=self.drafter,
            max_running=4,
            max_waiting=3,
            prefill_budget=budget,
            graphs=self.graphs,
            run_ahead=self.run_ahead,
            lane=lane,
        )
        memory = self.core.scheduler.memory
        pools = memory.pools
        assert isinstance(pools, FakePools)
        on_lane(lane, pools)
        memory.pages.on_free = pools.poison_pages
        memory.slots.on_free = pools.poison_slots
        self.num_idle = 0
        self.capacity = (pages - 1) * PAGE
        self.open_ones: list[Expected] = []
        self.texts: list[list[int]] = [[]]
        """Prompts and answers so far."""

    def tiers(self, host_bytes: int, disk_bytes: int, pools: FakePools) -> OffCard:
        disk = None
        if disk_bytes:
            disk = DiskTier(CacheFiles(Path(self.folder.name)), disk_bytes, self.thread)
        return OffCard(
            MemoryOnLane(self.lane, pools), host_bytes=host_bytes, disk=disk, write_above=0.1
        )

    @rule(num=st.integers(1, 4))
    def move(self, num: int) -> None:
        """The thread that reads and writes files gets on."""
        self.thread.run(num)

    @rule(at=st.integers(0, 200))
    def damage(self, at: int) -> None:
        for path in Path(self.folder.name).glob("*/*.cache"):
            content = bytearray(path.read_bytes())
            content[at % len(content)] ^= 0x40
            path.write_bytes(content)

    @rule(
        source=st.integers(0, 3),
        kept=st.sampled_from([60, 60, 17, 7, 0]),
        new=st.lists(st.integers(0, 15), max_size=9),
        max_tokens=st.sampled_from([2, 5, 30]),
        choices=st.integers(1, 3),
        request_id=st.sampled_from("abc"),
        priority=st.sampled_from([0, 0, 0, 1, -1]),
        pin_s=st.sampled_from([None, None, None, 10_000.0]),
    )
    def add(
        self,
        source: int,
        kept: int,
        new: list[int],
        max_tokens: int,
        choices: int,
        request_id: str,
        priority: int,
        pin_s: float | None,
    ) -> None:
        prompt = (self.texts[-1 - source % len(self.texts)][:kept] + new)[:50] or [1]
        self.texts.append(prompt)
        request = TokenRequest(
            request_id=request_id,
            priority=priority,
            pin_s=pin_s,
            tenant=request_id if priority else "",
            prompt_ids=tuple(prompt),
            max_tokens=max_tokens,
            sampling=SamplingParams(temperature=0),
        )
        for _ in range(choices):
            sequence = admit(request, INFO)
            if len(prompt) > self.capacity:
                with pytest.raises(PoolFullError):
                    self.core.add(sequence)
                return
            limit = min(sequence.max_tokens, self.capacity - len(prompt) + 1)
            try:
                self.core.add(sequence)
            except OverloadedError:
                return
            self.open_ones.append(Expected(sequence, prompt, limit))

    @rule(which=RARE)
    def abort(self, which: int) -> None:
        if which < len(self.open_ones):
            expected = self.open_ones.pop(which)
            self.core.abort(expected.sequence)
            sequence = expected.sequence
            assert sequence.held is None or sequence.num_in_flight
            self.texts.append(expected.prompt + expected.out)
            self.counted["aborts"] += 1

    @rule(which=RARE)
    def abort_while_the_model_runs(self, which: int) -> None:
        """The step under way still reads and writes its memory."""

        def abort(_: object) -> None:
            self.model.on_call = lambda _: None
            self.abort(which)

        self.model.on_call = abort
        self._step()
        self.model.on_call = lambda _: None

    @rule(which=RARE)
    def break_one(self, which: int) -> None:
        """E10: its next logits are NaN; so are those of whoever has the very same text."""
        if which < len(self.open_ones):
            expected = self.open_ones[which]
            text = expected.prompt + expected.out
            if self.run_ahead:  # these logits may be there already
                text += self.model.continuation(text, 1)
                if text in [e.prompt + e.out for e in self.open_ones]:
                    return
            self.model.broken.add(tuple(text))

    @rule(num_pages=st.integers(0, 5), num_slots=st.integers(0, 3))
    def evict(self, num_pages: int, num_slots: int) -> None:
        """E3: of a prefix, the state alone may go, or its rows with it."""
        cache = self.core.scheduler.memory.cache
        if cache is not None:
            cache.evict(num_pages, num_slots)

    @rule(count=st.integers(1, 12))
    def step(self, count: int) -> None:
        for _ in range(count):
            self._step()

    def _step(self) -> None:
        num_calls, is_open = len(self.model.calls), bool(self.open_ones)
        memory = self.core.scheduler.memory
        memory.wait = lambda: self.thread.run(1)
        emitted = self.core.step()
        has_run = len(self.model.calls) > num_calls
        assert has_run <= is_open or self.is_late
        gets_on = has_run or emitted or not is_open or memory.restoring
        self.num_idle = 0 if gets_on else self.num_idle + 1
        # A step that was launched ahead may be in vain for everybody.
        assert self.num_idle <= self.run_ahead, "nobody gets on"
        self.counted["steps"] += has_run
        by_sequence = {e.sequence: e for e in self.open_ones}
        for sequence, event in emitted:
            expected = by_sequence[sequence]
            if (*expected.prompt, *expected.out) in self.model.broken:
                assert event.token_id is None
                assert event.finish_reason == "error"
                self.open_ones.remove(expected)
                self.counted["faults"] += 1
                continue
            token = self.model.continuation(expected.prompt + expected.out, 1)[0]
            expected.out.append(token)
            is_full = len(expected.out) == expected.limit
            reason = "stop" if token == 3 else "length" if is_full else None
            assert (event.token_id, event.finish_reason) == (token, reason)
            assert event.cached_tokens < len(expected.prompt)
            if reason is not None:
                assert sequence.held is None
                self.texts.append(expected.prompt + expected.out)
                self.open_ones.remove(expected)

    @invariant()
    def scheduler_agrees(self) -> None:
        if hasattr(self, "core"):
            self.core.scheduler.check()

    @invariant()
    def states_are_those_of_their_tokens(self) -> None:
        if not hasattr(self, "core"):
            return
        pools = self.core.scheduler.memory.pools
        assert isinstance(pools, FakePools)
        for e in self.open_ones:
            held = e.sequence.held
            if held is not None and e.sequence.num_computed:
                state = pools.states[held.slot]
                assert state is not None
                assert state.ids == (e.prompt + e.out)[: e.sequence.num_computed]

    def teardown(self) -> None:
        """Everybody comes to an end, and no page or slot is left."""
        if not hasattr(self, "core"):
            return
        for _ in range(3000):
            if not self.open_ones:
                break
            self._step()
        assert not self.open_ones, "some sequences never end"
        self._count()
        for _ in range(1 + self.run_ahead):
            self.core.step()
        assert self.drafter is None or not self.drafter.known
        memory = self.core.scheduler.memory
        memory.forget()
        assert memory.pages.num_used == memory.slots.num_used == 0
        self.thread.run()
        memory.poll()
        self.core.scheduler.check()
        assert not list(Path(self.folder.name).glob("*/*.cache"))
        self.core.close()
        self.folder.cleanup()

    def _count(self) -> None:
        stats = self.core.stats()
        self.counted.update(
            machines=1,
            prompt_tokens=stats.prompt_tokens_total,
            prefix_cache_hit_tokens=stats.prefix_cache_hit_tokens_total,
            generated_tokens=stats.generated_tokens_total,
            preemptions=stats.preemptions_total,
            drafted_tokens=stats.drafted_tokens_total,
            accepted_tokens=stats.accepted_tokens_total,
        )


class MachineOnGraphs(MemoryMachine):
    graphs = True


class MachineThatRunsAhead(MemoryMachine):
    graphs = run_ahead = True


class LateMachine(MachineThatRunsAhead):
    """On a device that lags behind as far as it can."""

    is_late = True

    def new_lane(self) -> Lane:
        return LateLane()

    @invariant()
    def states_are_those_of_their_tokens(self) -> None:
        """They will be."""
