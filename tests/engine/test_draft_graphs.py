"""Steps that verify drafts on fixed buffers: a graph on a CPU runs the model again on whatever they
hold. Random schedules are in `test_ahead_machine`, states of tiny models in
`test_speculation_states`."""

from __future__ import annotations

from array import array
from collections.abc import Mapping, Sequence

import pytest
import schedules
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from memory_machine import LateMachine
from torch import Tensor

from perilune.core.types import EngineInfo, SamplingParams, TokenRequest
from perilune.engine.admission import admit
from perilune.engine.batch import Chunk
from perilune.engine.core import EngineCore
from perilune.engine.draft_buffers import DeviceDrafts, HostDrafts, Shape, Sizes
from perilune.engine.draft_graphs import DraftGraphs, shapes
from perilune.engine.fake_lane import LateLane
from perilune.engine.fake_model import FakeModel
from perilune.engine.fake_pools import FakeDecodeStep, FakePools
from perilune.engine.sequence import TokenSequence
from perilune.engine.speculation import MAX_ROWS
from perilune.model.step import NO_SLOT

INFO = EngineInfo(model_id="", vocab_size=64, max_context=400, eos_ids=frozenset())
PAGE = 4


class Right:
    """Drafts what comes, up to the first place that is said to be wrong."""

    def __init__(self, model: FakeModel, first_wrong: int = 99) -> None:
        self._model = model
        self._first_wrong = first_wrong

    def draft(self, wanted: Mapping[TokenSequence, int]) -> dict[TokenSequence, list[int]]:
        return {s: self._of(s, count) for s, count in wanted.items()}

    def forget(self, sequence: TokenSequence) -> None:
        pass

    def _of(self, sequence: TokenSequence, count: int) -> list[int]:
        text = [*sequence.request.prompt_ids, *sequence.generated_ids]
        right = self._model.continuation(text, count)
        return [(t + 1) % 64 if i == self._first_wrong else t for i, t in enumerate(right)]


def opened(core: EngineCore, prompt: Sequence[int], count: int) -> TokenSequence:
    request = TokenRequest(
        request_id=str(prompt),
        prompt_ids=tuple(prompt),
        max_tokens=count,
        sampling=SamplingParams(temperature=0),
    )
    core.add(sequence := admit(request, INFO))
    return sequence


def finish(core: EngineCore) -> None:
    while core.scheduler.has_work:
        core.step()


@given(st.integers(1, 40))
def test_shapes_are_few_and_have_room_for_every_step_with_drafts(most: int) -> None:
    found = shapes(most)
    assert len(set(found)) == len(found) <= 7
    assert max(shape.rows for shape in found) == found[-1].rows <= MAX_ROWS
    for count in range(1, most + 1):
        for each in (4, 8):
            if count * each <= MAX_ROWS:
                assert any(s.each == each and count <= s.sequences < 2 * count for s in found)


def test_every_graph_is_captured_before_the_first_step_and_none_after() -> None:
    lane, model = LateLane(), FakeModel(64)
    core = EngineCore(model, graphs=True, drafter=Right(model), max_running=3, lane=lane)
    core.warm_up()
    steps_alone, of_drafts = 3, len(shapes(3))
    assert lane.num_captured == steps_alone + 2 * of_drafts == 15
    sequences = [opened(core, [i], 30) for i in range(3)]
    finish(core)
    assert lane.num_captured == 15
    assert [s.generated_ids for s in sequences] == [model.continuation([i], 30) for i in range(3)]
    # Behind the prompts' step come four of drafts, all right, and one of the token that is left.
    stats = core.stats()
    assert stats.drafted_tokens_total == stats.accepted_tokens_total == 3 * (3 + 7 + 7 + 7)
    assert lane.num_replayed == 2 * 4 + 1


@pytest.mark.parametrize("first_wrong", [0, 1, 2])
def test_a_step_gives_what_is_right_of_a_draft_and_one_token_more(first_wrong: int) -> None:
    model = FakeModel(64, PAGE)
    core = EngineCore(model, graphs=True, drafter=Right(model, first_wrong), lane=LateLane())
    sequence = opened(core, [1, 2], 20)
    core.step()
    assert len(core.step()) == first_wrong + 1
    finish(core)
    assert sequence.generated_ids == model.continuation([1, 2], 20)


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_what_is_not_finite_ends_its_own_sequence(bad: float) -> None:
    class Broken(FakeModel):
        def logits(self, ids: Sequence[int]) -> Tensor:
            row_V = super().logits(ids)
            if ids[0] == 2 and len(ids) == 5:
                row_V[5] = bad
            return row_V

    right = FakeModel(64)
    core = EngineCore(Broken(64), graphs=True, drafter=Right(right), lane=LateLane())
    good, broken = opened(core, [1, 1], 9), opened(core, [2, 2], 9)
    emitted = [core.step() for _ in range(2)]
    told = [each.event for step in emitted for each in step if each.sequence is broken]
    assert [event.token_id for event in told] == [*right.continuation([2, 2], 3), None]
    assert "not finite" in (told[-1].error or "")
    finish(core)
    assert good.generated_ids == right.continuation([1, 1], 9)


def test_a_draft_may_reach_over_the_end_of_the_context() -> None:
    """What fills a step up needs a page that no token of the sequence will."""
    model = FakeModel(64, PAGE)
    core = EngineCore(
        model, graphs=True, drafter=Right(model), max_running=1, max_context=20, lane=LateLane()
    )
    core.warm_up()
    sequence = opened(core, range(1, 11), 10)
    finish(core)
    assert sequence.generated_ids == model.continuation(range(1, 11), 10)
    assert core.stats().accepted_tokens_total > 0


def test_beside_a_prompt_a_step_runs_without_a_graph() -> None:
    lane, model = LateLane(), FakeModel(64, PAGE)
    core = EngineCore(model, graphs=True, drafter=Right(model), prefill_budget=4, lane=lane)
    core.warm_up()
    first = opened(core, [1], 12)
    core.step()
    second = opened(core, range(10), 3)
    core.step()
    assert lane.num_replayed == 0
    assert len(first.generated_ids) > 2
    finish(core)
    assert lane.num_replayed > 0
    assert first.generated_ids == model.continuation([1], 12)
    assert second.generated_ids == model.continuation(range(10), 3)


def chunk(slot: int, pages: array[int], num_cached: int, each: int = 4) -> Chunk:
    ids = [100 * slot + i for i in range(each)]
    return Chunk(None, ids, slot, pages, num_cached, (), True, True, each - 1)


class Buffers:
    """Steps of pages of 4 tokens, checked as the fake model checks them."""

    def __init__(self) -> None:
        sizes = Sizes(4, 32, 6)
        self.device = DeviceDrafts(sizes, torch.device("cpu"))
        self.host = HostDrafts(sizes, False)
        self.pools = FakePools(slots=9, pages=99, page_len=PAGE)

    def step(self, shape: Shape) -> FakeDecodeStep:
        on, n = self.device, shape.sequences
        rows = (on.slot_N[:n], on.table_NJ[:n], on.length_N[:n], on.row_R[: shape.rows])
        return self.pools.decode_step(*rows, on.none_N[:n])

    def load(self, chunks: list[Chunk], shape: Shape) -> None:
        self.host.fill(chunks, shape, PAGE)
        self.device.take(self.host)
        fed = self.step(shape).fed(PAGE)
        assert fed[len(chunks) :] == [None] * (shape.sequences - len(chunks))
        for each, wanted in zip(fed, chunks, strict=False):
            assert each is not None
            assert each.is_draft
            assert (each.slot, each.length) == (wanted.slot, wanted.num_cached)
            assert each.num_new == each.num_logits == shape.each
            assert each.pages == list(wanted.pages[: len(each.pages)])
        ids = self.device.id_R[: shape.rows].tolist()
        wanted_ids = [token for each in chunks for token in each.token_ids]
        assert ids == wanted_ids + [0] * (shape.rows - len(wanted_ids))


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_what_a_graph_reads_is_the_step_whatever_was_there_before(data: st.DataObject) -> None:
    buffers = Buffers()
    fresh = iter(range(1, 10_000))
    for _ in range(data.draw(st.integers(2, 6))):
        slots = data.draw(st.lists(st.integers(0, 8), min_size=1, max_size=4, unique=True))
        shape = data.draw(st.sampled_from([s for s in shapes(4) if s.sequences >= len(slots)]))
        chunks = []
        for slot in slots:
            count = data.draw(st.integers(shape.each // PAGE, 6))
            pages = array("i", [next(fresh) for _ in range(count)])
            num_cached = data.draw(st.integers(0, PAGE * count - shape.each))
            chunks.append(chunk(slot, pages, num_cached, shape.each))
        buffers.load(chunks, shape)
        if data.draw(st.booleans()):
            buffers.device.rest()
            assert buffers.step(shape).fed(PAGE) == [None] * shape.sequences


@pytest.mark.parametrize(
    ("chunks", "message"),
    [
        ([chunk(3, array("i", [1]), 0), chunk(3, array("i", [2]), 0)], "not one a sequence"),
        ([chunk(NO_SLOT, array("i", [1]), 0)], "not one a sequence"),
        ([chunk(3, array("i", [1]), 1)], "do not fit"),
        ([chunk(3, array("i", [1]), 0, each=3)], "do not fit"),
        ([chunk(3, array("i", [1, 0]), 2)], "nobody's"),
    ],
)
def test_a_step_that_cannot_be(chunks: list[Chunk], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Buffers().load(chunks, Shape(2, 4))


def counts_of_the_step_before(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(DeviceDrafts, "take_kept", lambda self, host: self.keep_N.fill_(1))


def tables_that_stay_where_they_arrive(patch: pytest.MonkeyPatch) -> None:
    def wrong(self: DeviceDrafts, host: HostDrafts) -> None:
        *_, num_bytes = host.loaded
        self._bytes[:num_bytes].copy_(host.bytes_[:num_bytes])

    patch.setattr(DeviceDrafts, "take", wrong)


def states_that_stay_behind(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(DraftGraphs, "_accept", lambda self, step, n: None)


@pytest.mark.parametrize(
    "plant",
    [
        counts_of_the_step_before,
        tables_that_stay_where_they_arrive,
        states_that_stay_behind,
    ],
    ids=lambda plant: plant.__name__,
)
def test_a_planted_fault_is_found(plant, monkeypatch: pytest.MonkeyPatch) -> None:
    plant(monkeypatch)
    with pytest.raises((AssertionError, ValueError, IndexError, KeyError)):
        schedules.run_all(range(40), LateMachine)
