"""Whose turn it is: priorities, tenants, requests."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from perilune.core.errors import OverloadedError
from perilune.core.types import EngineInfo, SamplingParams, TokenRequest
from perilune.engine.admission import admit
from perilune.engine.core import EngineCore
from perilune.engine.cost_model import CostModel
from perilune.engine.fake_model import FakeModel
from perilune.engine.pooled_memory import Room
from perilune.engine.sequence import TokenSequence

RequestOf = Callable[..., TokenRequest]
COST = CostModel(token_flops=1e6, pair_flops=10.0, row_bytes=8, state_bytes=64)


class Bench:
    def __init__(self, info: EngineInfo, request_of: RequestOf, **limits: Any) -> None:
        self.model = FakeModel(info.vocab_size, page_len=4)
        options = {"room": Room(200, 40), "max_running": 4} | limits
        self.core = EngineCore(self.model, cost=COST, **options)
        self._info, self._request_of, self._count = info, request_of, 0

    def add(self, max_tokens: int = 6, **fields: Any) -> TokenSequence:
        self._count += 1
        fields = {
            "request_id": f"r{self._count}",
            "sampling": SamplingParams(temperature=0),
        } | fields
        prompt = fields.pop("prompt", [self._count] * 10)
        sequence = admit(self._request_of(prompt, max_tokens, **fields), self._info)
        self.core.add(sequence)
        return sequence

    def step(self) -> None:
        self.core.step()
        self.core.scheduler.check()

    def ends(self) -> list[TokenSequence]:
        """All, in the order in which they end."""
        order = {}
        while self.core.scheduler.has_work:
            for sequence, event in self.core.step():
                if event.finish_reason is not None:
                    order[sequence] = None
            self.core.scheduler.check()
        return list(order)

    def expect_answer(self, sequence: TokenSequence) -> None:
        expected = self.model.continuation(sequence.request.prompt_ids, sequence.max_tokens)
        assert sequence.generated_ids == expected


@pytest.fixture
def bench(info: EngineInfo, request_of: RequestOf) -> Bench:
    return Bench(info, request_of)


def test_a_higher_priority_takes_the_place_of_the_last_lower_one(bench: Bench) -> None:
    """Which goes on where it was: nothing is computed twice but the last token."""
    low = [bench.add(20) for _ in range(4)]
    for _ in range(3):
        bench.step()
    urgent = bench.add(4, priority=-1)
    bench.step()
    assert low[-1] in bench.core.scheduler.waiting
    assert bench.ends()[0] is urgent
    for sequence in [*low, urgent]:
        bench.expect_answer(sequence)
    assert bench.core.stats().preemptions_total == 1
    # Each prompt, each token that was generated but the last one; what was displaced starts at
    # the state that it left.
    assert sum(map(sum, bench.model.calls)) == 5 * 10 + 4 * 19 + 3


def test_an_equal_priority_waits(bench: Bench) -> None:
    low = [bench.add(20) for _ in range(4)]
    bench.step()
    late = bench.add(4)
    bench.step()
    assert late in bench.core.scheduler.waiting
    assert all(s in bench.core.scheduler.running for s in low)


def test_waiting_ones_are_taken_by_priority(bench: Bench) -> None:
    busy = [bench.add(8, priority=-5) for _ in range(4)]
    later = [bench.add(2, priority=p) for p in (3, 1, 2, 1)]
    ends = bench.ends()
    assert set(ends[:4]) == set(busy)
    # They begin together when the busy ones end together: what counts is who stands in front.
    assert ends[4:] == [later[1], later[3], later[2], later[0]]
    assert bench.core.scheduler.num_preempted == 0


def test_a_tenant_with_many_requests_does_not_keep_another_waiting(bench: Bench) -> None:
    crowd = [bench.add(30 if i else 6, tenant="crowd") for i in range(12)]
    alone = bench.add(2, tenant="alone")
    assert alone in bench.core.scheduler.waiting
    ends = bench.ends()
    # The first place that gets free is its own.
    assert ends.index(alone) == 1
    assert len(ends) == len(crowd) + 1


def test_a_request_of_many_sequences_is_no_obstacle_for_others(bench: Bench) -> None:
    many = [bench.add(5, request_id="many") for _ in range(6)]
    assert len(bench.core.scheduler.running) == 3
    other = bench.add(5)
    assert other in bench.core.scheduler.running
    assert len(bench.ends()) == len(many) + 1


def test_memory_goes_to_the_higher_priority(info: EngineInfo, request_of: RequestOf) -> None:
    """Eight pages for two sequences that grow to five each."""
    bench = Bench(info, request_of, room=Room(9, 6))
    low, high = bench.add(10, priority=1), bench.add(10, priority=0)
    assert bench.ends() == [high, low]
    assert bench.core.stats().preemptions_total > 0
    for sequence in (low, high):
        bench.expect_answer(sequence)


def test_what_is_displaced_does_not_count_as_queue(info: EngineInfo, request_of: RequestOf) -> None:
    bench = Bench(info, request_of, max_waiting=1)
    low = [bench.add(20) for _ in range(4)]
    bench.step()
    for _ in range(3):
        bench.add(4, priority=-1)
        bench.step()
    bench.add(4)
    with pytest.raises(OverloadedError, match="4 sequences run and 1 wait already"):
        bench.add(4)
    assert len(bench.ends()) == len(low) + 3 + 1


def test_a_displaced_sequence_can_be_aborted(bench: Bench) -> None:
    low = [bench.add(20) for _ in range(4)]
    bench.step()
    bench.add(4, priority=-1)
    bench.step()
    bench.core.abort(low[-1])
    assert low[-1].finish_reason == "abort"
    assert low[-1] not in bench.ends()
