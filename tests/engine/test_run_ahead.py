"""A step is launched before the one before has ended: what may happen in between."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from perilune.core.types import EngineInfo, SamplingParams, TokenEvent, TokenRequest
from perilune.engine.admission import admit
from perilune.engine.core import EngineCore
from perilune.engine.cost_model import CostModel
from perilune.engine.fake_lane import LateLane, on_lane
from perilune.engine.fake_model import FakeModel
from perilune.engine.fake_pools import FakePools, Fed
from perilune.engine.lane import HostLane, Work
from perilune.engine.pooled_memory import Room
from perilune.engine.sequence import TokenSequence
from perilune.model.init import random_weights
from perilune.model.model import Transformer
from perilune.model.presets import preset

COST = CostModel(token_flops=1e6, pair_flops=10.0, row_bytes=8, state_bytes=64)
INFO = EngineInfo(model_id="", vocab_size=64, max_context=400, eos_ids=frozenset())
PAGE = 4
GREEDY = SamplingParams(temperature=0)


class Notes(HostLane):
    """What was enqueued, and what was waited for, in order."""

    def __init__(self) -> None:
        self.seen: list[str] = []
        self._num_marks = 0

    def run(self, work: Work) -> None:
        self.seen.append("run")
        work()

    def mark(self) -> Work:
        self._num_marks += 1
        name = f"wait {self._num_marks}"
        # A buffer's next user waits as well.
        return lambda: None if name in self.seen else self.seen.append(name)


class Bench:
    def __init__(self, model: FakeModel | None = None, **options: Any) -> None:
        self.model = model or FakeModel(64, PAGE)
        options = {"graphs": True, "cost": COST, "lane": LateLane(), "room": Room(60, 12)} | options
        self.core = EngineCore(self.model, **options)
        self.core.warm_up()
        self.memory = self.core.scheduler.memory
        lane, pools = options["lane"], self.memory.pools
        assert isinstance(pools, FakePools)
        on_lane(lane, pools)
        self.memory.pages.on_free = pools.poison_pages
        self.memory.slots.on_free = pools.poison_slots
        self.events: dict[TokenSequence, list[TokenEvent]] = {}

    def open(self, prompt: Sequence[int], count: int, **fields: Any) -> TokenSequence:
        fields = {"request_id": str(len(self.events)), "sampling": GREEDY} | fields
        request = TokenRequest(prompt_ids=tuple(prompt), max_tokens=count, **fields)
        sequence = admit(request, INFO)
        self.core.add(sequence)
        self.events[sequence] = []
        return sequence

    def step(self, count: int = 1) -> None:
        for _ in range(count):
            for sequence, event in self.core.step():
                self.events[sequence].append(event)
            self.core.scheduler.check()

    def finish(self) -> None:
        while self.core.scheduler.has_work:
            self.step()
        self.step()

    def ids(self, sequence: TokenSequence) -> list[int | None]:
        return [event.token_id for event in self.events[sequence]]

    def truth(self, sequence: TokenSequence, count: int) -> list[int]:
        return self.model.continuation(sequence.request.prompt_ids, count)


@pytest.mark.parametrize("sampling", [GREEDY, SamplingParams(seed=1)])
def test_a_step_is_on_its_way_before_the_one_before_is_read(sampling: SamplingParams) -> None:
    lane = Notes()
    bench = Bench(lane=lane)
    bench.open([1, 2], 5, sampling=sampling)
    lane.seen.clear()
    bench.step(5)
    # The prompt comes first; that the fifth token is the last one is known before it is.
    by_step = "run, wait 1; run, run, wait 2; run, wait 3; run, wait 4; wait 5"
    assert lane.seen[:10] == by_step.replace(";", ",").split(", ")


@pytest.mark.parametrize(
    "sampling",
    [
        SamplingParams(seed=1, top_p=0.9),
        SamplingParams(seed=1, logprobs=0),
        SamplingParams(temperature=0, logprobs=0),
        SamplingParams(temperature=0, frequency_penalty=0.5),
    ],
)
def test_what_has_to_be_known_first_is_waited_for(sampling: SamplingParams) -> None:
    lane = Notes()
    bench = Bench(lane=lane)
    bench.open([1, 2], 6)
    bench.open([3], 6, sampling=sampling)
    lane.seen.clear()
    bench.step(5)
    waits = [f"wait {n}" for n in range(1, 6)]
    assert lane.seen == [each for wait in waits for each in ("run", wait)]


def test_what_the_device_draws_is_what_the_host_would() -> None:
    """Beside others, who come and go, and with logits that are not finite."""

    class Broken(FakeModel):
        def logits(self, ids: Sequence[int]) -> Tensor:
            row_V = super().logits(ids)
            return row_V * torch.nan if ids[0] == 5 and len(ids) == 6 else row_V

    kinds = [SamplingParams(seed=n, temperature=t) for n, t in enumerate((0.3, 1.0, 40.0, 1e-60))]
    kinds += [GREEDY, SamplingParams(seed=9, temperature=0.7)]
    answers = []
    for options in ({}, {"run_ahead": False}, {"graphs": False}):
        bench = Bench(Broken(64, PAGE), max_running=4, **options)
        opened = [
            bench.open([n, n], 7 + 5 * n, sampling=kind) for n, kind in enumerate([*kinds, GREEDY])
        ]
        bench.finish()
        assert opened[5].finish_reason == "error"
        answers.append([bench.ids(sequence) for sequence in opened])
    assert answers[0] == answers[1] == answers[2]
    assert answers[0][3] == bench.truth(opened[3], 22)


def test_a_stop_token_is_part_of_what_the_next_turn_finds() -> None:
    """The step in flight has fed it, in vain but for the state that it leaves."""
    bench = Bench()
    prompt = [5, 6, 7]
    answer = bench.model.continuation(prompt, 6)
    count = answer.index(answer[5]) + 1
    stop = frozenset({answer[5]})
    first = bench.open(prompt, 30, stop_ids=stop)
    bench.finish()
    assert bench.ids(first) == answer[:count]
    assert first.finish_reason == "stop"
    text = prompt + answer[:count]
    again = bench.open([*text, 9], 5)
    bench.finish()
    assert again.num_cached == len(text)
    assert bench.ids(again) == bench.truth(again, 5)


def test_memory_of_an_end_goes_to_others_behind_the_step_in_flight() -> None:
    """A slot and pages for one at a time, without a cache: the next one gets the very same."""
    bench = Bench(cost=None, room=Room(6, 1))
    answers = {n: bench.model.continuation([n, n], 9) for n in range(5)}
    opened = [
        bench.open([n, n], 12, stop_ids=frozenset({answer[4]})) for n, answer in answers.items()
    ]
    bench.finish()
    for n, sequence in enumerate(opened):
        assert sequence.finish_reason == "stop"
        assert bench.ids(sequence) == bench.truth(sequence, len(bench.ids(sequence)))
        assert len(bench.ids(sequence)) == answers[n].index(answers[n][4]) + 1
    assert bench.memory.pages.num_used == bench.memory.slots.num_used == 0


@pytest.mark.parametrize("steps", range(1, 7))
def test_an_abort_with_steps_in_flight(steps: int) -> None:
    bench = Bench(cost=None, room=Room(9, 2))
    one, other = bench.open([1, 2, 3], 12), bench.open([4], 12)
    third = bench.open([8, 9], 12)
    bench.step(steps)
    bench.core.abort(one)
    num_heard = len(bench.events[one])
    bench.finish()
    assert len(bench.events[one]) == num_heard
    for sequence in (other, third):
        assert bench.ids(sequence) == bench.truth(sequence, 12)
    assert bench.memory.pages.num_used == bench.memory.slots.num_used == 0


@pytest.mark.parametrize("after", range(1, 6))
@pytest.mark.parametrize("lane", [LateLane, HostLane])
def test_a_step_that_fails_in_flight_takes_only_the_open_ones_with_it(
    lane: type, after: int
) -> None:
    """Whether the fault shows when the step is launched or when it is waited for."""
    bench = Bench(lane=lane())
    first = bench.open([1, 2], 20)
    calls = 0

    def fail(step: Sequence[Fed]) -> None:
        nonlocal calls
        calls += 1
        if calls == after:
            raise RuntimeError("planted")

    bench.model.on_call = fail
    with pytest.raises(RuntimeError, match="planted"):
        bench.step(30)
    [ended] = bench.core.fail("it failed")
    assert ended.sequence is first
    assert ended.event.error == "it failed"
    assert bench.ids(first) == bench.truth(first, len(bench.ids(first)))
    second = bench.open([3, 4], 8)
    bench.finish()
    assert bench.ids(second) == bench.truth(second, 8)
    bench.memory.forget()
    assert bench.memory.pages.num_used == bench.memory.slots.num_used == 0


def test_closing_with_a_step_in_flight() -> None:
    bench = Bench()
    sequence = bench.open([1, 2], 20)
    bench.step(3)
    [ended] = bench.core.close()
    assert ended.sequence is sequence
    assert bench.core.step() == []
    assert not bench.core.wait_for_work()


def test_a_state_that_the_step_in_vain_has_broken_is_not_offered() -> None:
    class Broken(FakeModel):
        """Not finite behind the stop token."""

        stop = -1

        def logits(self, ids: Sequence[int]) -> Tensor:
            row_V = super().logits(ids)
            return row_V * torch.nan if ids[-1] == self.stop else row_V

    model = Broken(64, PAGE)
    model.stop = model.continuation([5, 6, 7], 4)[3]
    bench = Bench(model)
    first = bench.open([5, 6, 7], 20, stop_ids=frozenset({model.stop}))
    bench.finish()
    assert first.finish_reason == "stop"
    cache = bench.memory.cache
    assert cache is not None
    assert cache.peek([5, 6, 7, *first.generated_ids, 1]) == 0


def test_a_fault_ends_its_sequence_and_no_step_in_flight_feeds_what_is_no_token() -> None:
    class Broken(FakeModel):
        fed: list[int]

        def step(self, token_ids_T: Tensor, pools: Any, step: Any) -> Tensor:
            assert int(token_ids_T.min()) >= 0
            return super().step(token_ids_T, pools, step)

        def logits(self, ids: Sequence[int]) -> Tensor:
            row_V = super().logits(ids)
            return row_V * torch.nan if ids[0] == 2 and len(ids) == 5 else row_V

    bench = Bench(Broken(64, PAGE))
    broken, good = bench.open([2, 2], 12), bench.open([1, 1], 12)
    bench.finish()
    assert bench.ids(good) == bench.truth(good, 12)
    assert broken.finish_reason == "error"
    assert len(bench.events[broken]) == 4


@pytest.mark.parametrize("name", ["tiny-k3", "tiny-kimi-linear"])
def test_a_model_says_the_same(name: str) -> None:
    model = random_weights(Transformer(preset(name)), torch.Generator().manual_seed(5))
    generator = torch.Generator().manual_seed(6)
    prompts = [torch.randint(64, (n,), generator=generator).tolist() for n in (1, 70, 17, 33, 5)]

    def answers(run_ahead: bool) -> list[list[int]]:
        core = EngineCore(
            model,
            room=Room(20, 5),
            max_running=3,
            graphs=True,
            run_ahead=run_ahead,
            lane=LateLane(),
        )
        opened = []
        for i, prompt in enumerate(prompts):
            request = TokenRequest(
                request_id=str(i), prompt_ids=tuple(prompt), max_tokens=9 + i, sampling=GREEDY
            )
            opened.append(admit(request, INFO))
            core.add(opened[-1])
        while core.scheduler.has_work:
            core.step()
        return [sequence.generated_ids for sequence in opened]

    assert answers(True) == answers(False)
