"""Sampling against a slow, obvious implementation of the same definitions.

Legend: B rows, V vocabulary.
"""

from __future__ import annotations

import math
from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from perilune.core.types import SamplingParams
from perilune.engine.likeliest import likeliest
from perilune.engine.randomness import uniform
from perilune.engine.sampler import sample
from perilune.engine.sampling_state import SamplingState

VOCAB_SIZE = 23
F32 = np.float32
GOLDEN = [
    0.8336885269740499,
    0.9459165357046844,
    0.3214364412611488,
    0.4578540349636988,
    0.19053339933952396,
]

ids = st.lists(st.integers(0, VOCAB_SIZE - 1), min_size=1, max_size=12)
params = st.builds(
    SamplingParams,
    temperature=st.sampled_from([0.0, 1e-300, 1e-3, 0.3, 1.0, 1.7, 50.0]),
    top_k=st.sampled_from([0, 0, 1, 2, 7, 1000]),
    top_p=st.sampled_from([0.0, 0.1, 0.5, 0.93, 1.0, 1.0]),
    min_p=st.sampled_from([0.0, 0.0, 0.01, 0.3, 1.0]),
    presence_penalty=st.sampled_from([0.0, 0.0, 1.5, -0.7]),
    frequency_penalty=st.sampled_from([0.0, 0.0, 0.4, -1.1]),
    repetition_penalty=st.sampled_from([1.0, 1.0, 1.3, 0.6]),
    logit_bias=st.dictionaries(
        st.integers(0, VOCAB_SIZE - 1), st.sampled_from([-100.0, -1.0, 2.5, 100.0]), max_size=3
    ),
    logprobs=st.sampled_from([None, 0, 1, 5, VOCAB_SIZE]),
    seed=st.integers(-(2**63), 2**63 - 1),
)


def random_logits(seed: int, coarse: bool, rows: int = 1) -> torch.Tensor:
    """With `coarse` many logits are equal."""
    logits_BV = 2 * np.random.default_rng(seed).standard_normal((rows, VOCAB_SIZE)).astype(F32)
    return torch.from_numpy(np.round(logits_BV) if coarse else logits_BV)


def state_after(params: SamplingParams, prompt: list[int], output: list[int]) -> SamplingState:
    """The state at the token after `output`, as the engine gets there: a draw, then its token."""
    state = SamplingState(params, prompt)
    for token_id in output:
        sample(torch.zeros(1, VOCAB_SIZE), [state])
        state.append(token_id)
    return state


def slow_shape(
    logits: list[float], params: SamplingParams, prompt: list[int], output: list[int]
) -> list[np.float32]:
    shaped = []
    for j, raw in enumerate(logits):
        value = F32(raw) + F32(params.logit_bias.get(j, 0.0))
        if j in prompt or j in output:
            penalty = F32(params.repetition_penalty)
            value = value / penalty if value > 0 else value * penalty
        value -= F32(params.frequency_penalty) * F32(output.count(j))
        value -= F32(params.presence_penalty) * F32(j in output)
        shaped.append(value)
    return shaped


def slow_kept(shaped: list[np.float32], params: SamplingParams) -> dict[int, float]:
    """The tokens that may be drawn, each with its probability."""
    order = sorted(range(len(shaped)), key=lambda j: (-shaped[j], j))
    if params.temperature == 0:
        return {order[0]: 1.0}
    temperature = F32(max(params.temperature, np.finfo(F32).tiny))
    with np.errstate(over="ignore"):  # a tiny temperature drives all but the best to -inf
        weight = {j: math.exp((shaped[j] - shaped[order[0]]) / temperature) for j in order}
    kept = order[: params.top_k] if params.top_k else order
    if params.top_p < 1:
        mass, total = 0.0, sum(weight[j] for j in kept)
        for count, j in enumerate(kept, 1):
            mass += weight[j]
            if mass >= params.top_p * total:
                kept = kept[:count]
                break
    kept = [j for j in kept if weight[j] >= params.min_p]
    total = sum(weight[j] for j in kept)
    return {j: weight[j] / total for j in sorted(kept)}


@settings(max_examples=250, deadline=None)
@given(params, ids, st.lists(st.integers(0, VOCAB_SIZE - 1), max_size=5), st.integers(0, 10**6))
@example(SamplingParams(temperature=1.0, top_p=0.0, seed=1), [0], [], 0)
def test_a_token_is_what_the_definitions_say(
    params: SamplingParams, prompt: list[int], output: list[int], logits_seed: int
) -> None:
    logits_BV = random_logits(logits_seed, coarse=logits_seed % 2 == 0)
    state = state_after(params, prompt, output)

    [sampled] = sample(logits_BV, [state])

    shaped = slow_shape(logits_BV[0].tolist(), params, prompt, output)
    probability = slow_kept(shaped, params)
    assert sampled.token_id in probability
    below = sum(p for j, p in probability.items() if j < sampled.token_id)
    if params.temperature > 0:
        assert below - 1e-5 <= state.uniform() <= below + probability[sampled.token_id] + 1e-5


@given(st.integers(0, 10**6), st.booleans(), st.integers(0, VOCAB_SIZE), params)
def test_logprobs_are_those_of_the_raw_distribution(
    logits_seed: int, coarse: bool, num_top: int, params: SamplingParams
) -> None:
    logits_BV = random_logits(logits_seed, coarse)
    [sampled] = sample(logits_BV, [SamplingState(replace(params, logprobs=num_top), [1])])

    raw = logits_BV[0].tolist()
    log_sum = math.log(sum(math.exp(x) for x in raw))
    assert sampled.logprob is not None
    assert sampled.logprob.token_id == sampled.token_id
    assert sampled.logprob.logprob == pytest.approx(raw[sampled.token_id] - log_sum, abs=1e-5)
    order = sorted(range(VOCAB_SIZE), key=lambda j: (-raw[j], j))[:num_top]
    assert [token_id for token_id, _ in sampled.logprob.top] == order
    expected = [raw[j] - log_sum for j in order]
    assert [value for _, value in sampled.logprob.top] == pytest.approx(expected, abs=1e-5)


@settings(max_examples=50, deadline=None)
@given(st.lists(params, min_size=2, max_size=6), st.integers(0, 10**6))
def test_a_row_does_not_depend_on_the_other_rows(
    batch: list[SamplingParams], logits_seed: int
) -> None:
    logits_BV = random_logits(logits_seed, coarse=False, rows=len(batch))
    untouched_BV = logits_BV.clone()
    together = sample(logits_BV, [SamplingState(p, [1, 2]) for p in batch])
    alone = [
        sample(logits_BV[i : i + 1], [SamplingState(p, [1, 2])])[0] for i, p in enumerate(batch)
    ]
    assert together == alone
    assert torch.equal(logits_BV, untouched_BV)


def test_greedy_takes_the_lowest_id_on_a_tie() -> None:
    logits_BV = torch.tensor([[0.0, 3.0, 1.0, 3.0], [2.0, 2.0, 2.0, 2.0], [-1.0, -2.0, 0.5, 0.5]])
    greedy = SamplingParams(temperature=0)
    sampled = sample(logits_BV, [SamplingState(greedy, [0]) for _ in range(3)])
    assert [s.token_id for s in sampled] == [1, 0, 2]


def test_top_k_of_one_is_greedy_whatever_the_temperature() -> None:
    logits_BV = random_logits(3, coarse=True, rows=50)
    one = SamplingParams(temperature=5.0, top_k=1)
    sampled = sample(logits_BV, [SamplingState(one, [0]) for _ in range(50)])
    assert [s.token_id for s in sampled] == logits_BV.argmax(-1).tolist()


@pytest.mark.parametrize("bad", [[math.nan, 0.0], [math.inf, 0.0], [-math.inf, -math.inf]])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_row_that_is_not_finite_spoils_only_itself(bad: list[float], temperature: float) -> None:
    odd = SamplingParams(temperature=temperature, top_p=0.5, logprobs=1, frequency_penalty=1.0)
    states = [SamplingState(odd, [0]) for _ in range(2)]
    broken, fine = sample(torch.tensor([bad, [-math.inf, 1.0]]), states)
    assert (broken.token_id, broken.logprob) == (None, None)
    assert fine.token_id == 1


@settings(max_examples=50)
@given(st.integers(0, 10**6), st.sampled_from([0.2, 0.9, 0.9999]))
def test_a_nucleus_longer_than_the_first_look(logits_seed: int, top_p: float) -> None:
    rng = np.random.default_rng(logits_seed)
    logits_V = np.round(2 * rng.standard_normal(1500), 1).astype(F32)
    wide = SamplingParams(temperature=1.0, top_p=top_p, seed=logits_seed)
    kept = slow_kept(list(logits_V), wide)

    states = [SamplingState(replace(wide, seed=s), [0]) for s in range(64)]
    sampled = sample(torch.from_numpy(logits_V).expand(64, -1), states)

    assert {s.token_id for s in sampled} <= kept.keys()
    running = np.cumsum(list(kept.values()))
    ids = list(kept)
    for state, token in zip(states, sampled, strict=True):
        place = ids.index(token.token_id)
        assert running[place] - kept[token.token_id] - 1e-5 <= state.uniform()
        assert state.uniform() <= running[place] + 1e-5


@given(st.lists(st.integers(-3, 3), min_size=1, max_size=40), st.integers(1, 50))
def test_likeliest_breaks_ties_by_id(values: list[int], count: int) -> None:
    order = sorted(range(len(values)), key=lambda j: (-values[j], j))
    assert likeliest(torch.tensor(values, dtype=torch.float32), count).tolist() == order[:count]


def chi_square(counts: np.ndarray, probability: np.ndarray) -> float:
    expected = probability * counts.sum()
    return float(((counts - expected) ** 2 / expected).sum())


PROBABILITY = np.array([0.4, 0.02, 0.25, 0.03, 0.1, 0.15, 0.05])
LIMIT = 22.46
"""Chi-square with six degrees of freedom exceeds this once in a thousand samples."""


@pytest.mark.parametrize("temperature", [1.0, 0.5])
def test_many_seeds_draw_from_the_distribution(temperature: float) -> None:
    states = [
        SamplingState(SamplingParams(temperature=temperature, seed=seed), [0])
        for seed in range(20_000)
    ]
    logits_BV = torch.tensor(PROBABILITY, dtype=torch.float32).log().expand(len(states), -1)
    counts = np.bincount([s.token_id for s in sample(logits_BV, states)], minlength=7)
    powered = PROBABILITY ** (1 / temperature)
    assert chi_square(counts, powered / powered.sum()) < LIMIT


def test_one_seed_draws_from_the_distribution_and_without_memory() -> None:
    state = SamplingState(SamplingParams(seed=11), [0])
    logits_BV = torch.tensor(PROBABILITY, dtype=torch.float32).log()[None]
    tokens = []
    for _ in range(8000):
        tokens.append(sample(logits_BV, [state])[0].token_id)
        state.append(tokens[-1])
    assert chi_square(np.bincount(tokens, minlength=7), PROBABILITY) < LIMIT
    after_0 = [b for a, b in pairwise(tokens) if a == 0]
    assert chi_square(np.bincount(after_0, minlength=7), PROBABILITY) < LIMIT


def test_the_ends_of_the_random_range_hit_tokens_that_can_be_drawn(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    logits_BV = torch.tensor([[-math.inf, 0.0, -math.inf, 1.0, -math.inf]])
    for number, token_id in ((0.0, 1), (1 - 2**-53, 3)):
        monkeypatch.setattr(SamplingState, "uniform", lambda state, ahead, number=number: number)
        [sampled] = sample(logits_BV, [SamplingState(SamplingParams(), [0])])
        assert sampled.token_id == token_id


def test_a_seed_means_the_same_in_every_version() -> None:
    draws = [uniform(*address) for address in ((0, 0), (0, 1), (1, 0), (-5, 3), (2**63 - 1, 10**6))]
    assert draws == GOLDEN
    # Neighbouring seeds, which the choices of one request have, do not walk the same sequence.
    numbers = {uniform(seed, index) for seed in range(30) for index in range(30)}
    assert len(numbers) == 900


def test_no_seed_draws_a_fresh_one() -> None:
    assert SamplingState(SamplingParams(), [0]).seed != SamplingState(SamplingParams(), [0]).seed
