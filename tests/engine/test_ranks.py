"""Ranks follow the first one: the same pools, the same answers, and one end for all."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
import torch
from process_ends import exited
from torch import Tensor

from perilune.core.errors import ConfigError, EngineError
from perilune.core.types import EngineInfo, SamplingParams, TokenEvent, TokenRequest
from perilune.engine.admission import admit
from perilune.engine.cache_sizes import cost_of
from perilune.engine.client import EngineClient
from perilune.engine.core import EngineCore
from perilune.engine.errors import RanksApartError
from perilune.engine.follower import Follower
from perilune.engine.generate import generate
from perilune.engine.leader import SharedModel, SharedPools
from perilune.engine.opening import open_core
from perilune.engine.pooled_memory import Room
from perilune.engine.rank_wire import Accept, Feed, ToRank, decode_to_rank
from perilune.engine.restarts import RestartPolicy
from perilune.engine.sequence import TokenSequence
from perilune.engine.shared_graphs import SharedGraphs
from perilune.engine.supervisor import Supervisor
from perilune.engine.wire import Frames, frame
from perilune.model.api import LanguageModel, load_model
from perilune.model.init import random_weights
from perilune.model.model import Transformer
from perilune.model.parse_config import parse_config
from perilune.model.presets import tiny_k3
from perilune.model.save import save_checkpoint
from perilune.model.step import PAGE, Cut, Decoding, Prefilling

RequestOf = Callable[..., TokenRequest]
GREEDY = SamplingParams(temperature=0)
MANY = 3000


@pytest.fixture(scope="module")
def directory(tmp_path_factory) -> Path:
    config = parse_config(tiny_k3(mxfp4=True, num_hidden_layers=4))
    path = tmp_path_factory.mktemp("model") / "tiny"
    save_checkpoint(random_weights(Transformer(config), torch.Generator().manual_seed(5)), path)
    return path


@pytest.fixture(scope="module")
def model(directory) -> LanguageModel:
    return load_model(directory)


@pytest.fixture(scope="module")
def prompts() -> list[list[int]]:
    generator = torch.Generator().manual_seed(6)
    fresh = [torch.randint(128, (n,), generator=generator).tolist() for n in (1, 17, 70, 150)]
    return [*fresh, fresh[-1][:100] + fresh[1]]


class Line:
    """Both ends of a connection of two ranks: what is told arrives through frames; a step starts
    when the tokens are there."""

    def __init__(self, model: Transformer) -> None:
        self.follower = Follower(model, self, torch.device("cpu"))
        self.told: list[ToRank] = []
        self._waiting: Feed | Accept | None = None
        self._handed: Tensor | None = None

    def tell(self, message: ToRank) -> None:
        [body] = Frames().feed(frame(message))
        received = decode_to_rank(body)
        self.told.append(received)
        if isinstance(received, Feed | Accept):
            self._waiting = received
        else:
            self.follower.take(received)

    def handed_out(self, x: Tensor) -> Tensor:
        message, self._waiting = self._waiting, None
        if message is None:  # the follower's own call
            assert self._handed is not None
            return x.copy_(self._handed)
        self._handed = x
        self.follower.take(message)
        return x


class Guesses:
    """Drafts the answers that come, but for the last token of each draft."""

    def __init__(self, prompts: list[list[int]], answers: list[list[int]]) -> None:
        self._answers = dict(zip(map(tuple, prompts), answers, strict=True))

    def draft(self, wanted: Mapping[TokenSequence, int]) -> dict[TokenSequence, list[int]]:
        return {s: self._guess(s, count) for s, count in wanted.items()}

    def forget(self, sequence: TokenSequence) -> None:
        pass

    def _guess(self, sequence: TokenSequence, count: int) -> list[int]:
        first = len(sequence.generated_ids)
        *right, last = self._answers[sequence.request.prompt_ids][first : first + count]
        return [*right, (last + 1) % 128]


@pytest.mark.parametrize(("graphs", "drafts"), [(False, True), (True, False), (True, True)])
@pytest.mark.parametrize("crowded", [False, True])
def test_a_follower_has_the_same_pools(model, prompts, request_of, crowded, graphs, drafts) -> None:
    """Chunks, cuts, hits, copies, preemption, drafts or graphs: every byte of the tensors."""
    line = Line(model.model)
    if crowded:  # each needs a second page for its answer
        prompts = [prompt[:60] for prompt in (prompts[3], prompts[2], prompts[3][70:])]
    want = [g.token_ids for g in generate(model, prompts, max_tokens=9, ignore_eos=True)]
    core = EngineCore(
        SharedModel(model.model, line, line),
        room=Room(4 if crowded else 60, 12),
        cost=cost_of(model.model),
        max_running=4,
        prefill_budget=48,
        drafter=Guesses(prompts, want) if drafts else None,
        graphs=graphs,
        new_graphs=SharedGraphs,
    )
    pools = core.scheduler.memory.pools
    assert isinstance(pools, SharedPools)
    for turn in range(2):
        sequences = [admit(request_of(p, 9, sampling=GREEDY), info_of(model)) for p in prompts]
        for sequence in sequences:
            core.add(sequence)
        while core.scheduler.has_work:
            core.step()
            same_pools(pools, line)
        assert [s.generated_ids for s in sequences] == want, turn
    kinds = {type(message).__name__ for message in line.told}
    assert kinds >= {"NewPools", "CopySlots", "Feed"}
    assert crowded or graphs or "Accept" in kinds
    assert (kinds >= {"NewGraphs", "Capture", "Replay"}) == graphs
    of_drafts = {"NewDraftGraphs", "CaptureDrafts", "ReplayDrafts", "AcceptDrafts"}
    assert crowded or (kinds >= of_drafts) == (graphs and drafts)
    assert crowded or "CopyPages" in kinds
    assert (core.scheduler.num_preempted > 0) == crowded


def same_pools(pools: SharedPools, line: Line) -> None:
    for name in ("state_LSHKV", "window_LSWC", "rows_LPBC"):
        own, follower = (getattr(x, name) for x in (pools.own, line.follower._pools))
        assert torch.equal(own, follower), name


def info_of(model: LanguageModel) -> EngineInfo:
    return EngineInfo(
        model_id="tiny", vocab_size=128, max_context=MANY, eos_ids=model.config.eos_ids
    )


def test_a_step_tells_the_pages_that_its_tokens_lie_on(model) -> None:
    line = Line(model.model)
    pools = SharedModel(model.model, line, line).new_pools(slots=2, pages=9)
    decoding = [Decoding(0, [3, 1, 7, 8], PAGE + 1)]
    prefilling = [Prefilling(1, [5, 2, 6], 0, PAGE + 2, (Cut(4, 1),), 2)]
    feed = Feed.of(decoding, prefilling, num_each=1, verify=False)
    got_decoding, got_prefilling = feed.sequences()
    assert [(s.slot, list(s.pages), s.num_tokens) for s in got_decoding] == [(0, [3, 1], PAGE + 1)]
    [got] = got_prefilling
    assert (list(got.pages), got[2:]) == ([5, 2], (*prefilling[0][2:4], [Cut(4, 1)], 2))
    with pytest.raises(ValueError, match="a slot is written by two"):
        pools.step(decoding, prefilling)
    assert [type(message).__name__ for message in line.told] == ["NewPools"]


@torch.inference_mode()
def test_a_follower_verifies_and_accepts_drafts(model) -> None:
    line = Line(model.model)
    shared = SharedModel(model.model, line, line)
    pools = shared.new_pools(slots=3, pages=9)
    ids_T = torch.arange(12)
    prefill = pools.step([], [Prefilling(0, [1], 0, 7), Prefilling(2, [4], 0, 5)])
    shared.step(ids_T, pools, prefill)
    decoding = [Decoding(0, [1], 10), Decoding(2, [4], 8)]
    drafts = pools.step(decoding, num_each=3, verify=True)
    before = pools.own.state_LSHKV.clone()
    verified = shared.verify(ids_T[:6], pools, drafts)
    assert torch.equal(pools.own.state_LSHKV, before)
    shared.accept(verified, pools, drafts, torch.tensor([1, 3]))
    assert not torch.equal(pools.own.state_LSHKV, before)
    same_pools(pools, line)
    kinds = [type(message).__name__ for message in line.told]
    assert kinds == ["NewPools", "Feed", "Feed", "Accept"]


def test_what_fails_on_the_first_rank_ends_the_engine(model, request_of) -> None:
    line = Line(model.model)
    shared = SharedModel(model.model, line, line)
    core = EngineCore(shared, room=Room(20, 4))
    core.add(admit(request_of([1, 2, 3], 2), info_of(model)))
    line.handed_out = lambda x: x.view(-1, 7)
    with pytest.raises(RanksApartError, match=r"ranks no longer do the same: RuntimeError: shape"):
        core.step()


def test_ranks_that_cannot_share_a_model_are_refused_before_any_starts(directory) -> None:
    with pytest.raises(ConfigError, match="3 ranks cannot have equal parts of 4"):
        open_core(str(directory), tensor_parallel=3)


def children(pid: int) -> list[int]:
    return [int(p) for p in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


async def collect(engine: EngineClient, request: TokenRequest) -> list[TokenEvent]:
    return [event async for event in engine.generate(request)]


@asynccontextmanager
async def engine_of(directory: Path) -> AsyncIterator[tuple[EngineClient, Supervisor]]:
    """Whatever happens meanwhile, no process is left at the end."""
    supervisor = Supervisor(
        "process_cores:open_with_graphs",
        policy=RestartPolicy(quick_s=0, wait_s=300),
        model_dir=str(directory),
        tensor_parallel=2,
        threads=1,
    )
    try:
        await supervisor.start()
        yield EngineClient(supervisor), supervisor
    finally:
        left = [pid for pid in (supervisor.pid,) if pid is not None]
        left += [child for pid in left for child in children(pid)]
        await supervisor.close()
        assert all(map(exited, left))


@pytest.mark.usefixtures("cores_in_reach")
def test_two_ranks_answer_as_one_process_and_end_together(
    model, prompts, request_of, directory
) -> None:
    want = [g.token_ids for g in generate(model, prompts, max_tokens=9, ignore_eos=True)]

    async def check_answers(engine: EngineClient) -> None:
        requests = [request_of(p, 9, sampling=GREEDY) for p in prompts]
        answers = await asyncio.gather(*(collect(engine, r) for r in requests))
        assert [[event.token_id for event in events] for events in answers] == want

    async def run() -> None:
        async with engine_of(directory) as (engine, supervisor):
            assert engine.info.details["tensor_parallel"] == 2
            await check_answers(engine)
            await check_answers(engine)  # from the prefix cache
            assert engine.stats().prefix_cache_hit_tokens_total > 0
            for victim_of in (lambda pid: children(pid)[0], lambda pid: pid):
                pid = supervisor.pid
                assert pid is not None
                [follower] = children(pid)
                events = []
                async for event in engine.generate(request_of([5, 6], MANY, sampling=GREEDY)):
                    events.append(event)
                    if len(events) == 3:
                        os.kill(victim_of(pid), signal.SIGKILL)
                assert events[-1].finish_reason == "error"
                assert exited(follower)
                await check_answers(engine)
                assert supervisor.pid != pid

    asyncio.run(run())


@pytest.mark.usefixtures("cores_in_reach")
def test_a_rank_that_cannot_start_ends_the_engine(directory) -> None:
    supervisor = Supervisor(
        "process_cores:open_with_a_rank_that_cannot_start",
        model_dir=str(directory),
        tensor_parallel=2,
        threads=1,
    )
    with pytest.raises(EngineError, match="its process ended before it could serve"):
        asyncio.run(supervisor.start())
