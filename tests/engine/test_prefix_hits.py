"""What sequences take over from others, counted in the tokens that the model is fed."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from perilune.core.types import EngineInfo, SamplingParams, TokenRequest
from perilune.engine.admission import admit
from perilune.engine.core import EngineCore
from perilune.engine.cost_model import CostModel
from perilune.engine.errors import PoolFullError
from perilune.engine.fake_model import FakeModel
from perilune.engine.pooled_memory import Room
from perilune.engine.sequence import TokenSequence

RequestOf = Callable[..., TokenRequest]
GREEDY = SamplingParams(temperature=0)
COST = CostModel(token_flops=1e6, pair_flops=10.0, row_bytes=8, state_bytes=64)


class Bench:
    def __init__(
        self, info: EngineInfo, request_of: RequestOf, *, pages: int = 200, budget: int = 256
    ) -> None:
        self.model = FakeModel(info.vocab_size, page_len=4)
        self.core = EngineCore(self.model, room=Room(pages, 30), cost=COST, prefill_budget=budget)
        self._info, self._request_of = info, request_of

    def add(self, prompt: list[int], max_tokens: int = 1, **fields: Any) -> TokenSequence:
        request = self._request_of(prompt, max_tokens, sampling=GREEDY, **fields)
        sequence = admit(request, self._info)
        self.core.add(sequence)
        return sequence

    def run(self) -> int:
        """To the end of all; tokens fed."""
        before = len(self.model.calls)
        while self.core.scheduler.has_work:
            self.core.step()
            self.core.scheduler.check()
        return sum(map(sum, self.model.calls[before:]))


@pytest.fixture
def bench(info: EngineInfo, request_of: RequestOf) -> Bench:
    return Bench(info, request_of)


def test_choices_of_one_prompt_read_it_once(bench: Bench) -> None:
    prompt = [*range(20, 60)]
    choices = [bench.add(prompt, 3) for _ in range(5)]
    assert bench.run() == 40 + 4 * 1 + 5 * 2
    assert [s.num_cached for s in choices] == [0, 39, 39, 39, 39]
    assert {tuple(s.generated_ids) for s in choices} == {tuple(bench.model.continuation(prompt, 3))}
    stats = bench.core.stats()
    assert (stats.prompt_tokens_total, stats.prefix_cache_hit_tokens_total) == (200, 156)


def test_a_conversation_computes_its_new_tokens_and_the_last_one_before(bench: Bench) -> None:
    first = bench.add([*range(30)], 6)
    bench.run()
    second = bench.add([*range(30), *first.generated_ids, 40, 41, 42])
    assert bench.run() == 1 + 3
    assert second.num_cached == 35


def test_a_shared_prefix_is_kept_at_its_second_sighting(bench: Bench) -> None:
    """Each differs from the others right behind 32 tokens; the second one finds that out."""
    cached = []
    for last in range(4):
        sequence = bench.add([*range(32), 40 + last, *range(20)])
        bench.run()
        cached.append(sequence.num_cached)
    assert cached == [0, 0, 32, 32]


def test_what_a_step_leaves_serves_from_the_next_one_on(bench: Bench) -> None:
    """Both prompts are read in one step, and neither is the other's beginning."""
    bench.add([*range(30), 50, 50])
    bench.add([*range(30), 51, 51])
    bench.core.step()
    assert bench.model.calls == [(32, 32)]


def test_the_whole_memory_bounds_a_sequence(info: EngineInfo, request_of: RequestOf) -> None:
    bench = Bench(info, request_of, pages=6)
    with pytest.raises(PoolFullError, match="6 pages of the cache are wanted and 5 are free"):
        bench.add([1] * 21)
    full = bench.add([1] * 18, 50)
    bench.run()
    # Of 18 + 3 tokens the last one is never fed.
    assert (len(full.generated_ids), full.finish_reason) == (3, "length")


def test_memory_goes_to_the_oldest(info: EngineInfo, request_of: RequestOf) -> None:
    bench = Bench(info, request_of, pages=9)
    old, young = bench.add([1] * 8, 24), bench.add([2] * 8, 24)
    bench.run()
    assert bench.core.stats().preemptions_total > 0
    for sequence, token_id in ((old, 1), (young, 2)):
        assert sequence.generated_ids == bench.model.continuation([token_id] * 8, 24)
    ended = [len(call) for call in bench.model.calls]
    assert ended[-1] == 1, "the youngest ends last"


def test_nothing_is_kept_of_logits_that_are_not_finite(bench: Bench) -> None:
    clean = bench.model.logits
    bench.model.logits = lambda ids: clean(ids) * (float("nan") if len(ids) == 43 else 1)
    broken = bench.add([*range(40)], 10)
    bench.run()
    assert broken.finish_reason == "error"
    bench.model.logits = clean
    again = bench.add([*range(40)], 10)
    bench.run()
    assert again.num_cached == 0
    assert again.generated_ids == bench.model.continuation([*range(40)], 10)


def test_a_pinned_prompt_outlives_what_others_need(info: EngineInfo, request_of: RequestOf) -> None:
    """Twelve pages: each of the others, ten tokens and eight of an answer, takes five."""
    cached = {}
    for pin_s in (None, 600.0):
        bench = Bench(info, request_of, pages=13)
        first = bench.add([*range(20)], pin_s=pin_s)
        bench.run()
        assert first.num_pinned == (19 if pin_s else 0)
        for seed in range(5):
            bench.add([seed] * 10, 8)
            bench.run()
        again = bench.add([*range(20)])
        bench.run()
        cached[pin_s] = again.num_cached
    assert cached == {None: 0, 600.0: 19}


def test_pins_take_no_more_than_half(info: EngineInfo, request_of: RequestOf) -> None:
    bench = Bench(info, request_of, pages=13)
    pinned = [bench.add([i] * 20, pin_s=600.0) for i in range(3)]
    bench.run()
    assert sum(s.num_pinned for s in pinned) == 19


def test_a_sequence_learns_what_it_has_written_and_read(bench: Bench) -> None:
    first = bench.add([*range(30)], 6)
    bench.run()
    # Of the answer, the last token is never fed.
    assert (first.num_cached, first.written.num_tokens) == (0, 35)
    again = bench.add([*range(30), *first.generated_ids, 40], 3)
    bench.run()
    assert (again.num_cached, again.written.num_tokens) == (35, 2 + 2)


def test_a_prompt_that_was_given_up_goes_on_where_it_was(
    info: EngineInfo, request_of: RequestOf
) -> None:
    """A client that has waited too long asks again."""
    bench = Bench(info, request_of, budget=8)
    first = bench.add([*range(30)])
    bench.core.step()
    bench.core.step()
    bench.core.abort(first)
    again = bench.add([*range(30)])
    assert bench.run() == 30 - 16
    assert again.num_cached == 16
    assert again.generated_ids == bench.model.continuation([*range(30)], 1)


def test_an_answer_that_was_given_up_is_part_of_what_the_next_turn_finds(bench: Bench) -> None:
    """As far as it had been fed."""
    prompt = [*range(30)]
    first = bench.add(prompt, 30)
    for _ in range(5):
        bench.core.step()
    bench.core.abort(first)
    again = bench.add([*prompt, *first.generated_ids, 40])
    assert bench.run() == 1 + 1
    assert again.num_cached == 30 + 4


@pytest.mark.parametrize("num_steps", [0, 1, 4])
def test_what_is_given_up_while_the_model_runs_is_kept_behind_the_step(
    bench: Bench, num_steps: int
) -> None:
    """Its slot and pages are nobody else's before."""
    prompt = [*range(30)]
    first = bench.add(prompt, 30)
    for _ in range(num_steps):
        bench.core.step()

    def abort(_: object) -> None:
        bench.model.on_call = lambda _: None
        bench.core.abort(first)
        assert not bench.core.scheduler.has_work
        assert first.held is not None

    bench.model.on_call = abort
    assert bench.core.step() == []
    assert first.held is None
    assert first.finish_reason == "abort"
    text = prompt + bench.model.continuation(prompt, num_steps)
    again = bench.add([*text, 40])
    bench.run()
    assert again.num_cached == len(text)


def test_fifty_turns_compute_their_new_tokens(info: EngineInfo, request_of: RequestOf) -> None:
    """Each turn feeds the end of the last answer, which had not been fed, and its own message."""
    bench = Bench(replace(info, max_context=10_000), request_of, pages=400)
    text = [*range(25)]
    for turn in range(50):
        bench.add([9] * 3 + [turn, turn + 1], 2)  # somebody else's
        bench.run()
        sequence = bench.add(text, 5)
        new = len(text) if turn == 0 else 1 + 7
        assert bench.run() == new + 4
        assert sequence.num_cached == len(text) - new
        text += [*sequence.generated_ids, *(turn + i for i in range(7))]
