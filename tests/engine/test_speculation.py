"""What drafts may change is how many tokens a step gives, and nothing else."""

from __future__ import annotations

from collections.abc import Mapping
from random import Random
from typing import Any

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from perilune.core.types import EngineInfo, SamplingParams, TokenEvent, TokenRequest
from perilune.engine.admission import admit
from perilune.engine.core import EngineCore
from perilune.engine.fake_drafter import FakeDrafter
from perilune.engine.fake_lane import LateLane
from perilune.engine.fake_model import FakeModel
from perilune.engine.fake_pools import FakePools
from perilune.engine.pooled_memory import Room
from perilune.engine.sequence import TokenSequence
from perilune.engine.speculation import (
    MAX_ROWS,
    PATIENCE,
    REST,
    Drafter,
    LookupDrafter,
    Speculation,
)

INFO = EngineInfo(model_id="fake", vocab_size=16, max_context=80, eos_ids=frozenset({3}))
SAMPLINGS = (
    SamplingParams(temperature=0),
    SamplingParams(temperature=1.0, seed=7),
    SamplingParams(temperature=0.7, seed=8, top_p=0.9, logprobs=2),
    SamplingParams(temperature=1.0, seed=9, logit_bias={4: 2.0}),
    SamplingParams(temperature=0, repetition_penalty=1.3),
    SamplingParams(temperature=1.0, seed=3, presence_penalty=0.5),
)


class Scripted:
    """Drafts the same tokens for everybody."""

    def __init__(self, ids: list[int]) -> None:
        self.ids = ids
        self.wanted: list[int] = []

    def draft(self, wanted: Mapping[TokenSequence, int]) -> dict[TokenSequence, list[int]]:
        self.wanted += wanted.values()
        return {s: self.ids[:count] for s, count in wanted.items()}

    def forget(self, sequence: TokenSequence) -> None:
        pass


def sequence_of(prompt: list[int], max_tokens: int = 20, **fields: Any) -> TokenSequence:
    fields = {"sampling": SAMPLINGS[0], "request_id": "r", **fields}
    return admit(TokenRequest(prompt_ids=tuple(prompt), max_tokens=max_tokens, **fields), INFO)


def core_of(model: FakeModel, drafter: Drafter | None, **limits: Any) -> EngineCore:
    return EngineCore(model, drafter=drafter, prefill_budget=16, **limits)


def run(core: EngineCore, sequences: list[TokenSequence]) -> list[list[TokenEvent]]:
    for sequence in sequences:
        core.add(sequence)
    events: dict[TokenSequence, list[TokenEvent]] = {s: [] for s in sequences}
    while core.scheduler.has_work:
        for sequence, event in core.step():
            events[sequence].append(event)
        core.scheduler.check()
    return list(events.values())


@settings(max_examples=30, deadline=None)
@given(
    prompts=st.lists(st.lists(st.integers(0, 15), min_size=1, max_size=20), min_size=1, max_size=5),
    samplings=st.lists(st.sampled_from(SAMPLINGS), min_size=5, max_size=5),
    seed=st.integers(0, 2**32),
    graphs=st.booleans(),
)
def test_events_are_those_without_drafts(
    prompts: list[list[int]], samplings: list[SamplingParams], seed: int, graphs: bool
) -> None:
    def sequences() -> list[TokenSequence]:
        return [
            sequence_of(prompt, sampling=sampling)
            for prompt, sampling in zip(prompts, samplings, strict=False)
        ]

    model, draw = FakeModel(INFO.vocab_size), Random(seed)
    drafter = FakeDrafter(model, lambda most: draw.randint(0, most))
    expected = run(core_of(model, None), sequences())
    assert run(core_of(model, drafter, graphs=graphs, lane=LateLane()), sequences()) == expected


def test_a_right_draft_is_one_step_and_a_wrong_one_costs_none() -> None:
    model = FakeModel(INFO.vocab_size)
    prompt = [1, 2]
    first, *right = model.continuation(prompt, 4)
    for num_right in range(4):
        draft = [*right[:num_right], *[(i + 1) % 16 for i in right[num_right:]]]
        core = core_of(model, Scripted(draft))
        sequence = sequence_of(prompt, ignore_eos=True)
        core.add(sequence)
        assert [e.event.token_id for e in core.step()] == [first]
        tokens = [e.event.token_id for e in core.step()]
        assert tokens == model.continuation([*prompt, first], num_right + 1)
        assert sequence.num_computed == len(prompt) + 1 + num_right
        stats = core.stats()
        assert (stats.drafted_tokens_total, stats.accepted_tokens_total) == (3, num_right)


def test_nothing_counts_behind_a_token_that_ends_the_sequence() -> None:
    model = FakeModel(INFO.vocab_size)
    prompt = [1, 2]
    first, second, third, _ = model.continuation(prompt, 4)
    assert len({first, second, third}) == 3
    core = core_of(model, Scripted(model.continuation([*prompt, first], 3)))
    sequence = sequence_of(prompt, stop_ids=frozenset({second}))
    [events] = run(core, [sequence])
    assert [(e.token_id, e.finish_reason) for e in events] == [(first, None), (second, "stop")]
    assert core.stats().generated_tokens_total == 2


def test_no_more_is_drafted_than_the_limit_leaves() -> None:
    model, drafter = FakeModel(INFO.vocab_size), Scripted([0, 0, 0, 0])
    run(core_of(model, drafter), [sequence_of([1], max_tokens=3, ignore_eos=True)])
    assert drafter.wanted == [1]


def test_a_fault_in_a_drafted_row_ends_the_sequence_behind_what_is_right() -> None:
    class Broken(FakeModel):
        def logits(self, ids: Any) -> torch.Tensor:
            row_V = super().logits(ids)
            return row_V * torch.nan if len(ids) == 4 else row_V

    right = FakeModel(INFO.vocab_size).continuation([1, 2], 4)
    core = core_of(Broken(INFO.vocab_size), Scripted(right[1:]))
    [events] = run(core, [sequence_of([1, 2], ignore_eos=True)])
    assert [(e.token_id, e.finish_reason) for e in events[:-1]] == [(t, None) for t in right[:2]]
    assert events[-1].finish_reason == "error"


def test_where_pages_are_short_a_step_goes_without_drafts() -> None:
    model = FakeModel(INFO.vocab_size, page_len=4)
    drafter = FakeDrafter(model, lambda most: most)
    core = core_of(model, drafter, room=Room(3, 2), max_running=1)
    sequence = sequence_of([1, 2], max_tokens=50, ignore_eos=True)
    [events] = run(core, [sequence])
    assert [e.token_id for e in events] == model.continuation([1, 2], 7)  # two pages of four


def test_rows_of_a_step_are_limited() -> None:
    drafter = Scripted([1, 2, 3])
    for count, width in ((1, 3), (8, 3), (10, 2), (MAX_ROWS // 2, 1)):
        decoding = [sequence_of([1]) for _ in range(count)]
        assert Speculation(drafter).propose(decoding).width == width
    drafter.wanted.clear()
    decoding = [sequence_of([1]) for _ in range(MAX_ROWS // 2 + 1)]
    assert Speculation(drafter).propose(decoding).width == 0
    assert not drafter.wanted


def test_where_widths_are_few_drafts_are_as_long_as_the_next_one() -> None:
    drafter = Scripted([1, 2, 3, 4, 5, 6, 7])
    speculation = Speculation(drafter, (3, 7))
    [sequence] = decoding = [sequence_of([1], max_tokens=40)]
    for num_right, wanted in ((1, 3), (3, 7), (5, 7)):
        speculation.propose(decoding)
        speculation.note(sequence, drafter.wanted[-1], num_right)
        assert speculation.propose(decoding).width == drafter.wanted[-1] == wanted
    for count, width in ((4, 7), (5, 3), (8, 3), (9, 0)):
        many = [sequence_of([1], max_tokens=40) for _ in range(count)]
        speculation = Speculation(Scripted([1, 2, 3, 4, 5]), (3, 7))
        speculation.propose(many)
        for each in many:
            speculation.note(each, 3, 3)
        assert speculation.propose(many).width == width


def test_where_nothing_is_found_nobody_looks_for_some_steps() -> None:
    class Never(Scripted):
        def draft(self, wanted: Mapping[TokenSequence, int]) -> dict[TokenSequence, list[int]]:
            self.wanted += wanted.values()
            return {}

    for rests, looked in ((False, "y" * 16), (True, "y" * PATIENCE + "nnnynnny")):
        drafter = Never([])
        speculation = Speculation(drafter, rests=rests)
        decoding = [sequence_of([1])]
        for number, looks in enumerate(looked):
            num_asked, pauses = len(drafter.wanted), speculation.is_pausing(decoding)
            if pauses and number % 2:  # launched ahead or not
                speculation.skip(decoding)
            else:
                assert speculation.propose(decoding).width == 0
            assert len(drafter.wanted) - num_asked == (looks == "y") == (not pauses)


def test_what_is_found_ends_the_rest() -> None:
    drafter = Scripted([])
    speculation = Speculation(drafter, rests=True)
    decoding = [sequence_of([1], max_tokens=90)]
    for _ in range(PATIENCE):
        speculation.propose(decoding)
    for _ in range(REST):
        assert speculation.is_pausing(decoding)
        speculation.skip(decoding)
    drafter.ids = [1, 2, 3]
    for _ in range(PATIENCE + 1):
        assert speculation.propose(decoding).width > 0
    drafter.ids = []
    speculation.propose(decoding)
    assert not speculation.is_pausing(decoding)


def test_one_draft_among_many_sequences_is_not_worth_it() -> None:
    class ForOne(Scripted):
        def draft(self, wanted: Mapping[TokenSequence, int]) -> dict[TokenSequence, list[int]]:
            return dict([*super().draft(wanted).items()][:1])

    decoding = [sequence_of([1]) for _ in range(3)]
    speculation = Speculation(ForOne([1, 2, 3]))
    assert speculation.propose(decoding).width == 0
    assert speculation.propose(decoding[:2]).width == 3


def test_an_abort_while_drafts_are_verified_harms_nobody() -> None:
    class Aborting(FakeModel):
        def accept(self, *args: Any) -> None:
            core.abort(gone)
            super().accept(*args)

    model = Aborting(INFO.vocab_size)
    core = core_of(model, FakeDrafter(model, lambda most: most))
    memory = core.scheduler.memory
    assert isinstance(memory.pools, FakePools)
    memory.slots.on_free = memory.pools.poison_slots
    gone, stays = sequence_of([1, 2], ignore_eos=True), sequence_of([5], ignore_eos=True)
    events = run(core, [gone, stays])
    assert [event.token_id for event in events[1]] == model.continuation([5], 20)
    assert gone.finish_reason == "abort"
    assert len(events[0]) == 1


def test_looked_up_drafts_follow_a_repetition() -> None:
    sequence = sequence_of([1, 2, 3, 4, 1, 2], ignore_eos=True)
    drafter = LookupDrafter()
    assert drafter.draft({sequence: 3}) == {sequence: []}
    sequence.append(3)
    assert drafter.draft({sequence: 3}) == {sequence: [4, 1, 2]}
    drafter.forget(sequence)
    assert drafter.draft({sequence: 2}) == {sequence: [4, 1]}
