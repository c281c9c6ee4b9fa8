"""Faults that comparable engines have had, each by the smallest input that shows it.

Tiny models of both families with random weights; every freed slot and page is NaN. `Truth` is the
model alone: one forward pass without memory for each token.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest
import torch

from perilune.core.types import EngineInfo, SamplingParams, TokenRequest
from perilune.engine.admission import admit
from perilune.engine.cache_tiers import Tiers, tiers_of
from perilune.engine.core import EngineCore
from perilune.engine.cost_model import CostModel
from perilune.engine.pooled_memory import Room
from perilune.engine.retention import Retention
from perilune.engine.sequence import TokenSequence
from perilune.model.api import LanguageModel
from perilune.model.init import random_weights
from perilune.model.model import Transformer
from perilune.model.pools import Pools
from perilune.model.presets import preset
from perilune.model.step import PAGE

COST = CostModel(token_flops=1e6, pair_flops=10.0, row_bytes=100, state_bytes=10_000)
CLOSE = 1e-3
AMPLE = Room(40, 12)


@pytest.fixture(scope="module", params=["tiny-k3", "tiny-kimi-linear"])
def model(request: pytest.FixtureRequest) -> LanguageModel:
    generator = torch.Generator().manual_seed(5)
    return LanguageModel(random_weights(Transformer(preset(request.param)), generator))


def ids_of(model: LanguageModel, count: int, seed: int = 0) -> list[int]:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(model.config.vocab_size, (count,), generator=generator).tolist()


class Bench:
    """An engine whose pools are NaN wherever nobody has written."""

    def __init__(
        self,
        model: LanguageModel,
        *,
        room: Room = AMPLE,
        is_caching: bool = True,
        budget: int = 4096,
        interval: int = 0,
        tiers: Tiers | None = None,
    ) -> None:
        self.model = model
        self.core = EngineCore(
            model.model,
            room=room,
            cost=COST if is_caching else None,
            retention=Retention(interval=interval),
            tiers=tiers,
            max_running=4,
            prefill_budget=budget,
        )
        self.memory = self.core.scheduler.memory
        assert isinstance(self.memory.pools, Pools)
        self.pools = self.memory.pools
        self.memory.pages.on_free = self.poison_pages
        self.memory.slots.on_free = self.poison_slots
        self.poison_pages(range(room.pages))
        self.poison_slots(range(room.slots))
        self.cached: dict[TokenSequence, int] = {}

    def poison_pages(self, pages: Sequence[int]) -> None:
        self.pools.rows_LPBC[:, list(pages)] = torch.nan

    def poison_slots(self, slots: Sequence[int]) -> None:
        self.pools.state_LSHKV[:, list(slots)] = torch.nan
        self.pools.window_LSWC[:, list(slots)] = torch.nan

    def open(self, prompt: Sequence[int], max_tokens: int) -> TokenSequence:
        config = self.model.config
        info = EngineInfo(
            model_id="",
            vocab_size=config.vocab_size,
            max_context=config.max_position_embeddings,
            eos_ids=frozenset(),
        )
        request = TokenRequest(
            request_id=str(len(self.cached)),
            prompt_ids=tuple(prompt),
            max_tokens=max_tokens,
            sampling=SamplingParams(temperature=0, logprobs=0),
        )
        sequence = admit(request, info)
        self.core.add(sequence)
        return sequence

    def step(self) -> dict[TokenSequence, float]:
        """Log-probabilities of this step's tokens."""
        found = {}
        for sequence, event in self.core.step():
            self.cached[sequence] = event.cached_tokens
            found[sequence] = event.logprob.logprob if event.logprob else float("nan")
        self.core.scheduler.check()
        return found

    def run(self, *prompts: Sequence[int], max_tokens: int = 4) -> list[list[float]]:
        """Together; the log-probabilities of each answer, which is checked against the truth."""
        sequences = [self.open(prompt, max_tokens) for prompt in prompts]
        found: dict[TokenSequence, list[float]] = {s: [] for s in sequences}
        while self.core.scheduler.has_work:
            for sequence, logprob in self.step().items():
                found[sequence].append(logprob)
        for sequence in sequences:
            self.expect_truth(sequence, found[sequence])
        return list(found.values())

    def expect_truth(self, sequence: TokenSequence, logprobs: Sequence[float]) -> None:
        prompt, answer = list(sequence.request.prompt_ids), sequence.generated_ids
        assert len(answer) == len(logprobs) == sequence.max_tokens
        logits_TV = self.model.logits([prompt + answer])[0].log_softmax(-1)
        truth = [float(logits_TV[len(prompt) - 1 + i, t]) for i, t in enumerate(answer)]
        assert list(logprobs) == pytest.approx(truth, abs=CLOSE)
        best_T = logits_TV[len(prompt) - 1 : -1].max(-1).values
        assert truth == pytest.approx(best_T.tolist(), abs=CLOSE), "not the most likely tokens"


def test_e1_a_state_handed_from_chunk_to_chunk(model: LanguageModel) -> None:
    """Handed on transposed, it would still have the right shape."""
    prompt = ids_of(model, 300)
    [whole] = Bench(model, is_caching=False).run(prompt)
    for budget in (150, 64, 7):
        [parts] = Bench(model, is_caching=False, budget=budget).run(prompt)
        assert parts == pytest.approx(whole, abs=CLOSE)


@pytest.mark.parametrize("budget", [40, 100])
def test_e2_a_chunk_that_ends_inside_of_a_page(model: LanguageModel, budget: int) -> None:
    """Only what is computed is published: while the first one is under way, others miss."""
    bench = Bench(model, budget=budget, interval=32)
    prompt = ids_of(model, 200)
    first = bench.open(prompt, 4)
    bench.step()
    assert first.num_computed == budget
    assert bench.memory.cache is not None
    assert bench.memory.cache.peek(prompt) == budget // 32 * 32
    logprobs = []
    while bench.core.scheduler.has_work:
        logprobs += bench.step().values()
    bench.expect_truth(first, logprobs)
    bench.run(prompt[:150] + ids_of(model, 30, 1))
    bench.run(prompt)
    assert list(bench.cached.values()) == [0, 128, 199]


def test_e3_the_state_is_gone_and_the_rows_are_left(model: LanguageModel) -> None:
    bench = Bench(model)
    shared = ids_of(model, 100)
    bench.run(shared + ids_of(model, 20, 1))
    bench.run(shared + ids_of(model, 20, 2))
    bench.run(shared + ids_of(model, 20, 3))
    assert [*bench.cached.values()] == [0, 0, 100]
    cache = bench.memory.cache
    assert cache is not None
    assert cache.pin([*shared, *ids_of(model, 20, 1)], ttl_s=1e6)
    cache.evict(0, bench.memory.slots.capacity)
    assert cache.peek([*shared, 0]) == 0
    assert bench.memory.pages.num_used >= 100 / PAGE, "the rows are to stay"
    bench.run(shared + ids_of(model, 20, 4))
    assert [*bench.cached.values()][-1] == 0


def test_e5_a_chat_of_many_turns(model: LanguageModel) -> None:
    """Only the new tokens of each turn are computed, and one: the last of the answer before."""
    bench, plain = Bench(model), Bench(model, is_caching=False)
    text, known = ids_of(model, 90), 0
    for turn in range(6):
        [cached], [alone] = bench.run(text), plain.run(text)
        assert cached == pytest.approx(alone, abs=CLOSE)
        sequence = list(bench.cached)[-1]
        text = text + sequence.generated_ids
        assert bench.cached[sequence] == known
        known = len(text) - 1
        text = text + ids_of(model, 5, turn)


def test_e6_chunks_are_counted_from_each_request(model: LanguageModel) -> None:
    together = Bench(model, is_caching=False).run(ids_of(model, 100), ids_of(model, 200, 1))
    alone = [
        Bench(model, is_caching=False).run(prompt)[0]
        for prompt in (ids_of(model, 100), ids_of(model, 200, 1))
    ]
    for left, right in zip(together, alone, strict=True):
        assert left == pytest.approx(right, abs=CLOSE)


def test_e10_a_nan_stays_in_its_request(model: LanguageModel) -> None:
    """Planted in its state, beside a neighbour; then slot and pages go to a successor."""
    bench = Bench(model, room=Room(9, 3))
    bad, good = bench.open(ids_of(model, 70), 8), bench.open(ids_of(model, 50, 1), 8)
    logprobs = [bench.step()[good]]
    assert bad.held is not None
    bench.pools.state_LSHKV[:, bad.held.slot] = torch.nan
    events = {emitted.sequence: emitted.event for emitted in bench.core.step()}
    assert events[bad].error is not None
    assert events[good].logprob is not None
    logprobs.append(events[good].logprob.logprob)
    assert bad.finish_reason == "error"
    assert bench.memory.cache is not None
    assert bench.memory.cache.peek(ids_of(model, 70)) == 0, "what it has left is still offered"
    bench.expect_truth(good, [*logprobs, *_rest(bench, good)])
    for seed in range(4):
        bench.run(ids_of(model, 70), ids_of(model, 60, seed + 2))


def test_e10_what_others_have_left_is_kept(model: LanguageModel) -> None:
    """Of a system prompt, of a conversation beside the broken one; not of what came of it."""
    bench = Bench(model)
    shared = ids_of(model, 80)
    other = shared + ids_of(model, 20, 1)
    bench.run(other)
    bench.run(shared + ids_of(model, 20, 2))
    prompt = shared + ids_of(model, 30, 3)
    bad = bench.open(prompt, 8)
    bench.step()
    assert bad.num_cached == 80
    child = prompt + ids_of(model, 10, 4)
    bench.open(child, 1)
    bench.step()
    cache = bench.memory.cache
    assert cache is not None
    assert bad.held is not None
    assert cache.peek([*child, 0]) == len(child)
    bench.pools.state_LSHKV[:, bad.held.slot] = torch.nan
    bench.step()
    assert bad.finish_reason == "error"
    assert cache.peek([*other, 0]) == len(other) - 1
    assert cache.peek([*child, 0]) == cache.peek([*prompt, 0]) == 80
    bench.run(prompt, child, other)


def test_e10_a_broken_state_in_the_cache_is_met_once(model: LanguageModel) -> None:
    """Nothing tells it from others before somebody has begun with it."""
    bench = Bench(model)
    prompt = ids_of(model, 80)
    bench.run(prompt)
    cache = bench.memory.cache
    assert cache is not None
    hit = cache.lookup(prompt)
    assert hit.slot is not None
    bench.pools.state_LSHKV[:, hit.slot] = torch.nan
    cache.drop(hit)
    bad = bench.open(prompt, 4)
    bench.step()
    assert (bad.num_cached, bad.finish_reason) == (79, "error")
    bench.run(prompt)
    assert [*bench.cached.values()][-1] == 0


def _rest(bench: Bench, sequence: TokenSequence) -> list[float]:
    found = []
    while bench.core.scheduler.has_work:
        found += [value for s, value in bench.step().items() if s is sequence]
    return found


def test_e12_a_prompt_that_is_cut_by_one_token_is_computed_anew(model: LanguageModel) -> None:
    bench = Bench(model)
    bench.pools.state_LSHKV.view(torch.uint8).fill_(0x3E)
    prompt = ids_of(model, 80)
    bench.run(prompt)
    bench.run(prompt[:-1])
    assert list(bench.cached.values()) == [0, 0]
    bench.run(prompt)
    assert list(bench.cached.values())[-1] == 79


def test_e13_a_decoding_request_does_not_hear_of_its_neighbours(model: LanguageModel) -> None:
    """Alone, and beside the prefill of another."""
    prompt = ids_of(model, 33)
    alone = Bench(model, is_caching=False)
    first = alone.open(prompt, 12)
    expected = _rest(alone, first)
    bench = Bench(model, is_caching=False, budget=20)
    again = bench.open(prompt, 12)
    while not again.generated_ids:
        bench.step()
    bench.open(ids_of(model, 90, 1), 2)
    found = _rest(bench, again)
    assert again.generated_ids == first.generated_ids
    assert found == pytest.approx(expected[1:], abs=CLOSE)


@pytest.mark.parametrize("interval", [0, 16])
def test_what_is_preempted_goes_on_as_if_it_had_not_been(
    model: LanguageModel, interval: int
) -> None:
    """Three sequences that grow to three pages each, on seven pages."""
    bench = Bench(model, room=Room(8, 5), interval=interval)
    bench.run(*(ids_of(model, 100, seed) for seed in range(3)), max_tokens=2 * PAGE - 40)
    assert bench.core.stats().preemptions_total > 0


@pytest.mark.parametrize("is_on_disk", [False, True])
def test_what_comes_back_to_the_card_is_what_left_it(
    model: LanguageModel, is_on_disk: bool, tmp_path: Path
) -> None:
    """All of the pools is NaN in between. Host memory alone has room for half of it."""
    pools = model.model.new_pools(slots=1, pages=1)
    one = pools.slot_nbytes + 3 * pools.page_nbytes
    host_bytes = (3 if is_on_disk else 100) * one
    bench = Bench(model, tiers=tiers_of(host_bytes, str(tmp_path) if is_on_disk else None))
    prompts = [ids_of(model, 150, seed) for seed in range(3)]
    bench.run(*prompts)
    cache, off_card = bench.memory.cache, bench.memory.off_card
    assert cache is not None
    assert off_card is not None
    for _ in range(20):
        cache.evict(1, 1)
        off_card.poll()
        while off_card._disk is not None and off_card._disk.is_writing:
            off_card.poll()
    assert bench.memory.pages.num_used == bench.memory.slots.num_used == 0
    only_on_disk = [s for s in cache._tree.owner if off_card._is_only_on_disk(s)]
    assert bool(only_on_disk) == is_on_disk
    bench.cached.clear()
    bench.run(*prompts)
    bench.core.close()
    assert not list(tmp_path.glob("run-*"))
    assert list(bench.cached.values()) == [149] * 3
