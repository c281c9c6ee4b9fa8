"""The step loop against a model of it in plain lists, driven by hypothesis."""

from __future__ import annotations

from dataclasses import dataclass, field

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, invariant, multiple, rule

from perilune.core.errors import OverloadedError
from perilune.core.types import EngineInfo, SamplingParams, TokenEvent, TokenRequest
from perilune.engine.admission import admit
from perilune.engine.core import EngineCore
from perilune.engine.fake_model import FakeModel
from perilune.engine.fake_pools import FakePools
from perilune.engine.sequence import TokenSequence

MAX_RUNNING, MAX_PER_REQUEST, MAX_WAITING, BUDGET = 4, 3, 2, 8
INFO = EngineInfo(model_id="fake", vocab_size=16, max_context=40, eos_ids=frozenset({3}))


@dataclass(eq=False)
class Expected:
    """One open sequence, as the machine sees it."""

    sequence: TokenSequence
    prompt: list[int]
    limit: int
    num_fed: int = 0
    out: list[int] = field(default_factory=list)

    @property
    def request_id(self) -> str:
        return self.sequence.request.request_id

    @property
    def left(self) -> int:
        return len(self.prompt) + len(self.out) - self.num_fed


class StepMachine(RuleBasedStateMachine):
    sequences = Bundle("sequences")
    runs_ahead = False

    def __init__(self) -> None:
        super().__init__()
        self.model = FakeModel(INFO.vocab_size)
        self.core = EngineCore(
            self.model,
            max_running=MAX_RUNNING,
            max_waiting=MAX_WAITING,
            prefill_budget=BUDGET,
            graphs=self.runs_ahead,
        )
        self.running: list[Expected] = []
        self.waiting: list[Expected] = []

    @rule(
        target=sequences,
        prompt=st.lists(st.integers(0, 15), min_size=1, max_size=30),
        max_tokens=st.integers(1, 30),
        request_id=st.sampled_from("abc"),
    )
    def add(self, prompt: list[int], max_tokens: int, request_id: str) -> object:
        request = TokenRequest(
            request_id=request_id,
            prompt_ids=tuple(prompt),
            max_tokens=max_tokens,
            sampling=SamplingParams(temperature=0),
        )
        sequence = admit(request, INFO)
        self.waiting.append(Expected(sequence, prompt, min(max_tokens, 40 - len(prompt))))
        self._promote()
        if len(self.waiting) > MAX_WAITING:
            self.waiting.pop()
            with pytest.raises(OverloadedError):
                self.core.add(sequence)
            return multiple()
        self.core.add(sequence)
        return sequence

    @rule(sequence=consumes(sequences))
    def abort(self, sequence: TokenSequence) -> None:
        self.core.abort(sequence)
        assert sequence.held is None or sequence.num_in_flight
        self._leave(sequence)

    @rule()
    def step(self) -> None:
        before = {id(e): e.num_fed for e in self.running}
        emitted = {id(item.sequence): item.event for item in self.core.step()}
        self._expect_shares(before)
        for expected in list(self.running):
            self._expect_token(expected, emitted.pop(id(expected.sequence), None))
        assert not emitted

    def _expect_shares(self, before: dict[int, int]) -> None:
        """Decoding sequences advance by one; prompts share the budget and the oldest has half."""
        prefilling = [e for e in self.running if not e.out]
        for e in self.running:
            fed = self._fed(e)
            assert fed == 1 or not e.out
            e.num_fed += fed
        fed_by = [e.num_fed - before[id(e)] for e in prefilling]
        lengths = [len(e.prompt) - before[id(e)] for e in prefilling]
        if self._is_their_turn(fed_by) and prefilling:
            assert sum(fed_by) == min(BUDGET, sum(lengths))
            assert fed_by[0] >= min(BUDGET // 2, lengths[0])

    def _fed(self, e: Expected) -> int:
        # A sequence that ended in this step has fed all that was left.
        return e.left if e.sequence.finish_reason else e.sequence.num_computed - e.num_fed

    def _is_their_turn(self, fed_by: list[int]) -> bool:
        return True

    def _expect_token(self, expected: Expected, event: TokenEvent | None) -> None:
        if expected.left:
            assert event is None
            return
        token = self.model.continuation(expected.prompt + expected.out, 1)[0]
        expected.out.append(token)
        reason = "stop" if token == 3 else "length" if len(expected.out) == expected.limit else None
        assert event is not None
        assert (event.token_id, event.finish_reason) == (token, reason)
        if reason:
            assert expected.sequence.held is None
            self._leave(expected.sequence)

    def _leave(self, sequence: TokenSequence) -> None:
        self.running = [e for e in self.running if e.sequence is not sequence]
        self.waiting = [e for e in self.waiting if e.sequence is not sequence]
        self._promote()

    def _promote(self) -> None:
        """Places are dealt out one by one to the request with the fewest of them."""
        while len(self.running) < MAX_RUNNING:
            held = [e.request_id for e in self.running]
            able = [e for e in self.waiting if held.count(e.request_id) < MAX_PER_REQUEST]
            if not able:
                return
            able.sort(key=lambda e: held.count(e.request_id))
            self.waiting.remove(able[0])
            self.running.append(able[0])

    @invariant()
    def scheduler_agrees(self) -> None:
        scheduler = self.core.scheduler
        scheduler.check()
        assert list(scheduler.running) == [e.sequence for e in self.running]
        assert list(scheduler.waiting) == [e.sequence for e in self.waiting]

    @invariant()
    def every_token_is_fed_once_and_in_order(self) -> None:
        pools = self.core.scheduler.memory.pools
        assert isinstance(pools, FakePools)
        for e in self.running:
            held = e.sequence.held
            if held is not None and e.num_fed:
                state = pools.states[held.slot]
                assert state is not None
                assert state.ids == (e.prompt + e.out)[: len(state.ids)]
                assert 0 <= len(state.ids) - e.num_fed <= self.runs_ahead


class MachineThatRunsAhead(StepMachine):
    """Prompts may have to let a step pass that was launched before they came."""

    runs_ahead = True

    def __init__(self) -> None:
        super().__init__()
        self.has_waited = False

    def _fed(self, e: Expected) -> int:
        """The token of the step in flight is not counted."""
        if e.out:
            return 1
        return e.left if e.sequence.finish_reason else e.sequence.num_computed - e.num_fed

    def _is_their_turn(self, fed_by: list[int]) -> bool:
        is_turn = self.has_waited or any(fed_by) or not fed_by
        self.has_waited = not is_turn
        return is_turn


TestStepMachine = StepMachine.TestCase
TestStepMachine.settings = settings(max_examples=40, stateful_step_count=30, deadline=None)
TestMachineThatRunsAhead = MachineThatRunsAhead.TestCase
TestMachineThatRunsAhead.settings = TestStepMachine.settings
