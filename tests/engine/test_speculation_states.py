"""Drafts on tiny models: tokens, states and latents are those of an engine without them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from random import Random

import pytest
import torch

from perilune.core.types import EngineInfo, SamplingParams, TokenRequest
from perilune.engine.admission import admit
from perilune.engine.core import EngineCore
from perilune.engine.cost_model import CostModel
from perilune.engine.pooled_memory import Room
from perilune.engine.sequence import TokenSequence
from perilune.engine.speculation import Drafter, LookupDrafter
from perilune.model.init import random_weights
from perilune.model.model import Transformer
from perilune.model.pools import Pools
from perilune.model.presets import preset
from perilune.model.step import PAGE

COST = CostModel(token_flops=1e6, pair_flops=10.0, row_bytes=100, state_bytes=10_000)
ROOM = Room(30, 12)
NUM_NEW = 24
CLOSE = 1e-9
"""Of states in fp64: products of several rows are summed in another order."""


@pytest.fixture(scope="module", params=["tiny-k3", "tiny-kimi-linear"])
def model(request: pytest.FixtureRequest) -> Transformer:
    generator = torch.Generator().manual_seed(5)
    return random_weights(Transformer(preset(request.param)), generator).double()


class Knowing:
    """Has the answers, and spoils a random end of them."""

    def __init__(self, answers: Mapping[tuple[int, ...], list[int]]) -> None:
        self._answers = answers
        self._random = Random(1)

    def draft(self, wanted: Mapping[TokenSequence, int]) -> dict[TokenSequence, list[int]]:
        drafts = {}
        for sequence, count in wanted.items():
            start = len(sequence.generated_ids)
            draft = self._answers[sequence.request.prompt_ids][start : start + count]
            first_wrong = self._random.randint(0, len(draft))
            drafts[sequence] = [*draft[:first_wrong], *[0] * (len(draft) - first_wrong)]
        return drafts

    def forget(self, sequence: TokenSequence) -> None:
        pass


def run(
    model: Transformer,
    prompts: Sequence[Sequence[int]],
    drafter: Drafter | None,
    graphs: bool = False,
) -> tuple[list[list[int]], dict[tuple[int, int], torch.Tensor], int]:
    """Answers; states and the newest latents, by prompt and number of tokens seen; steps."""
    core = EngineCore(
        model, room=ROOM, cost=COST, drafter=drafter, max_running=4, graphs=graphs, run_ahead=False
    )
    memory = core.scheduler.memory
    pools = memory.pools
    assert isinstance(pools, Pools)
    pools.rows_LPBC.fill_(torch.nan)
    pools.state_LSHKV.fill_(torch.nan)
    info = EngineInfo(
        model_id="", vocab_size=model.config.vocab_size, max_context=4096, eos_ids=frozenset()
    )
    sequences = [
        admit(
            TokenRequest(
                request_id=str(i),
                prompt_ids=tuple(prompt),
                max_tokens=NUM_NEW,
                sampling=SamplingParams(temperature=0),
            ),
            info,
        )
        for i, prompt in enumerate(prompts)
    ]
    for sequence in sequences:
        core.add(sequence)
    seen, num_steps = {}, 0
    while core.scheduler.has_work:
        core.step()
        num_steps += 1
        for i, sequence in enumerate(sequences):
            if sequence.held is not None:
                count = sequence.num_computed
                rows = pools.rows_LPBC[:, list(sequence.held.pages)].flatten(1, 2)[:, :count]
                state = pools.state_LSHKV[:, sequence.held.slot]
                seen[i, count] = torch.cat([state.flatten(), rows.flatten()])
    return [s.generated_ids for s in sequences], seen, num_steps


def prompts_of(model: Transformer) -> list[list[int]]:
    generator = torch.Generator().manual_seed(2)
    vocab = model.config.vocab_size
    return [
        torch.randint(vocab, (count,), generator=generator).tolist()
        for count in (PAGE - 3, 5, 2 * PAGE)  # across pages, and drafts across their ends
    ]


@pytest.mark.parametrize("graphs", [False, True])
def test_states_and_latents_are_those_without_drafts(model: Transformer, graphs: bool) -> None:
    prompts = prompts_of(model)
    answers, states, num_steps = run(model, prompts, None)
    drafter = Knowing({tuple(p): a for p, a in zip(prompts, answers, strict=True)})
    drafted, drafted_states, num_drafted_steps = run(model, prompts, drafter, graphs)
    assert drafted == answers
    assert num_drafted_steps < num_steps
    assert drafted_states.keys() <= states.keys()
    for key, state in drafted_states.items():
        assert torch.isfinite(state).all()
        assert (state - states[key]).abs().max() <= CLOSE * states[key].abs().max(), key


def test_looking_up_changes_no_token_of_a_text_that_repeats_itself(model: Transformer) -> None:
    prompts = [[7, 8, 9, 10] * 12, [5] * 30, prompts_of(model)[1]]
    answers, _, _ = run(model, prompts, None)
    assert run(model, prompts, LookupDrafter())[0] == answers
