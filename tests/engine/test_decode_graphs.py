"""Decode steps on fixed buffers: a graph on a CPU runs the model again on whatever they hold."""

from __future__ import annotations

from array import array
from collections.abc import Sequence

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from perilune.core.types import EngineInfo, SamplingParams, TokenEvent, TokenRequest
from perilune.engine.admission import admit
from perilune.engine.batch import Chunk
from perilune.engine.core import EngineCore
from perilune.engine.decode_buffers import DeviceBuffers, HostBuffer, PageTables
from perilune.engine.decode_graphs import row_counts
from perilune.engine.fake_model import FakeModel
from perilune.engine.fake_pools import FakePools
from perilune.engine.lane import HostLane, Work
from perilune.engine.pooled_memory import Room
from perilune.engine.sequence import TokenSequence
from perilune.model.init import random_weights
from perilune.model.model import Transformer
from perilune.model.pools import Pools
from perilune.model.presets import preset
from perilune.model.step import NO_SLOT

GREEDY = SamplingParams(temperature=0)
KINDS = [
    GREEDY,
    SamplingParams(seed=3),
    SamplingParams(temperature=0, logprobs=2),
    SamplingParams(temperature=0, repetition_penalty=1.3, logit_bias={5: 2.0}),
    SamplingParams(seed=4, top_p=0.8, top_k=20, logprobs=0),
]
CPU = torch.device("cpu")


class CountingLane(HostLane):
    def __init__(self) -> None:
        self.captured = self.replayed = 0

    def capture(self, work: Work) -> Work:
        work()
        self.captured += 1

        def replay() -> None:
            self.replayed += 1
            work()

        return replay


def open_sequence(core: EngineCore, prompt: list[int], count: int, **fields: object) -> object:
    info = EngineInfo(model_id="", vocab_size=64, max_context=400, eos_ids=frozenset())
    fields = {"sampling": GREEDY, "request_id": str(prompt), **fields}
    request = TokenRequest(prompt_ids=tuple(prompt), max_tokens=count, **fields)
    core.add(sequence := admit(request, info))
    return sequence


def run(core: EngineCore) -> dict[TokenSequence, list[TokenEvent]]:
    events: dict[TokenSequence, list[TokenEvent]] = {}
    while core.scheduler.has_work:
        for sequence, event in core.step():
            events.setdefault(sequence, []).append(event)
    return events


@given(st.integers(1, 700))
def test_row_counts_are_few_and_close(most: int) -> None:
    counts = row_counts(most)
    assert counts == sorted(set(counts))
    assert counts[-1] == most
    assert len(counts) <= 12 + most // 32
    for rows in range(1, most + 1):
        n = next(count for count in counts if count >= rows)
        assert n - rows < max(2, rows / 2 + 4)


def test_every_graph_is_captured_before_the_first_step_and_none_after() -> None:
    lane = CountingLane()
    core = EngineCore(FakeModel(64), graphs=True, max_running=20, lane=lane)
    core.warm_up()
    assert lane.captured == len(row_counts(20)) == 6
    for i in range(20):
        open_sequence(core, [i], 3 + i)
    run(core)
    assert lane.captured == 6
    # One step reads the prompts, and each answer's first token comes from it.
    assert lane.replayed == 3 + 19 - 1


@pytest.mark.parametrize("name", ["tiny-k3", "tiny-kimi-linear"])
def test_a_model_does_on_graphs_what_it_does_without(name: str) -> None:
    """Tokens and log-probabilities; prompts come and go, so that rows and sizes change. Whatever
    nobody has written is NaN."""
    model = random_weights(Transformer(preset(name)), torch.Generator().manual_seed(5))
    generator = torch.Generator().manual_seed(6)
    lengths = (1, 63, 17, 130, 64, 5, 70, 33)
    prompts = [torch.randint(64, (n,), generator=generator).tolist() for n in lengths]

    def answers(graphs: bool) -> list[list[TokenEvent]]:
        core = EngineCore(model, room=Room(30, 5), max_running=5, graphs=graphs, max_context=300)
        pools = core.scheduler.memory.pools
        assert isinstance(pools, Pools)
        for pool in (pools.state_LSHKV, pools.window_LSWC, pools.rows_LPBC):
            pool.fill_(torch.nan)
        opened = [
            open_sequence(core, prompt, 4 + 3 * i, sampling=KINDS[i % len(KINDS)])
            for i, prompt in enumerate(prompts)
        ]
        events = run(core)
        assert not pools.rows_LPBC[:, 0, 1:].isfinite().any(), "only row 0 is for inert rows"
        return [events[each] for each in opened]

    for with_them, without in zip(answers(True), answers(False), strict=True):
        assert [e.token_id for e in with_them] == [e.token_id for e in without]
        for a, b in zip(with_them, without, strict=True):
            assert (a.logprob is None) == (b.logprob is None)
            if a.logprob is not None and b.logprob is not None:
                assert a.logprob.logprob == pytest.approx(b.logprob.logprob, abs=1e-4)


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_what_is_not_finite_ends_its_own_sequence(bad: float) -> None:
    class Broken(FakeModel):
        def logits(self, ids: Sequence[int]) -> Tensor:
            row_V = super().logits(ids)
            if ids[0] == 2 and len(ids) == 4:
                row_V[5] = bad
            return row_V

    model = Broken(64)
    core = EngineCore(model, graphs=True)
    good, broken = open_sequence(core, [1, 1], 6), open_sequence(core, [2, 2], 6)
    events = run(core)
    assert [e.token_id for e in events[good]] == model.continuation([1, 1], 6)
    assert [e.token_id is None for e in events[broken]] == [False, False, True]
    assert "not finite" in (events[broken][-1].error or "")


def chunk(slot: int, pages: array[int], num_cached: int, source: int | None = None) -> Chunk:
    sequence = None
    return Chunk(sequence, [slot + 40], slot, pages, num_cached, (), True, True, source)


class Buffers:
    """Steps of pages of 4 tokens, checked as the fake model checks them."""

    def __init__(self, rows: int = 6, pages: int = 5) -> None:
        self.device = DeviceBuffers(rows, pages, CPU)
        self.hosts = [HostBuffer(rows, pages, False) for _ in range(2)]
        self.tables = PageTables(rows, pages, 4)
        self.pools = FakePools(slots=9, pages=40, page_len=4)

    def load(self, chunks: list[Chunk], n: int) -> None:
        on, host = self.device, self.hosts[0]
        self.hosts.reverse()
        host.fill(chunks, n, self.tables)
        on.take(host)
        step = self.pools.decode_step(on.slot_N[:n], on.table_NJ[:n], on.length_N[:n], on.row_N[:n])
        fed = step.fed(4)
        assert fed[len(chunks) :] == [None] * (n - len(chunks))
        for each, wanted in zip(fed, chunks, strict=False):
            assert each is not None
            assert (each.slot, each.length) == (wanted.slot, wanted.num_cached)
            assert each.pages == list(wanted.pages[: len(each.pages)])
        on.sampled_N.copy_(torch.arange(100, 100 + len(on.sampled_N)))
        known = on.known_2N[on.source_N[:n]].tolist()
        wanted_ids = [c.slot + 40 if c.source is None else 100 + c.source for c in chunks]
        assert known == wanted_ids + [0] * (n - len(chunks))


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_what_a_graph_reads_is_the_step_whatever_was_there_before(data: st.DataObject) -> None:
    buffers = Buffers()
    pages = [array("i") for _ in range(9)]
    fresh = iter(range(1, 10_000))
    for _ in range(data.draw(st.integers(2, 6))):
        slots = data.draw(st.lists(st.integers(0, 8), min_size=1, max_size=6, unique=True))
        chunks = []
        for slot in slots:
            if data.draw(st.booleans()):  # another sequence has the slot now
                pages[slot] = array("i")
            grown = data.draw(st.integers(max(len(pages[slot]), 1), 5))
            pages[slot].extend(next(fresh) for _ in range(grown - len(pages[slot])))
            num_cached = data.draw(st.integers(0, 4 * grown - 1))
            source = data.draw(st.none() | st.integers(0, 5))
            chunks.append(chunk(slot, pages[slot], num_cached, source))
        buffers.load(chunks, data.draw(st.integers(len(chunks), 6)))


@pytest.mark.parametrize(
    ("chunks", "message"),
    [
        ([chunk(3, array("i", [1]), 2), chunk(3, array("i", [2]), 2)], "not one a row"),
        ([chunk(NO_SLOT, array("i", [1]), 2)], "not one a row"),
        ([chunk(3, array("i", [1]), 4)], "do not fit"),
        ([chunk(3, array("i", [0]), 2)], "do not fit"),
    ],
)
def test_a_step_that_cannot_be(chunks: list[Chunk], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Buffers().load(chunks, 4)


def test_capturing_in_between_forgets_nothing_that_was_sampled() -> None:
    on = DeviceBuffers(4, 2, CPU)
    on.sampled_N.copy_(torch.tensor([7, 8, 9, 10]))
    on.slot_N.fill_(1)
    on.rest()
    assert on.slot_N.tolist() == [NO_SLOT] * 4
    on.sampled_N.zero_()
    on.resume()
    assert on.sampled_N.tolist() == [7, 8, 9, 10]
