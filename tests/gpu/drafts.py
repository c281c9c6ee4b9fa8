"""Drafts that graphs verify on a GPU: the answers without graphs, and those without drafts.

Legend: V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from random import Random
from typing import NamedTuple

import torch
from torch import Tensor

from perilune.core.types import EngineInfo, SamplingParams, TokenRequest
from perilune.engine.admission import admit
from perilune.engine.core import EngineCore
from perilune.engine.draft_graphs import WIDTHS
from perilune.engine.sequence import TokenSequence
from perilune.engine.speculation import Drafter, Speculation
from perilune.model.model import Transformer
from perilune.model.pools import Pools
from perilune.model.step import Prefilling

Add = Callable[..., None]
"""Of a table: name, value, whether it is as it should be."""
NUM_NEW = 64
STATES = {"float32": 1e-5, "bfloat16": 2e-2}
"""Of states after all answers, with graphs and without."""


class Guesses:
    """Drafts answers that are known, and spoils a random end of each draft: the same one wherever
    the answer has got to the same place."""

    def __init__(self, prompts: Sequence[Sequence[int]], answers: Sequence[list[int]]) -> None:
        self._answers = {tuple(p): a for p, a in zip(prompts, answers, strict=True)}

    def draft(self, wanted: Mapping[TokenSequence, int]) -> dict[TokenSequence, list[int]]:
        return {s: self._of(s, count) for s, count in wanted.items()}

    def forget(self, sequence: TokenSequence) -> None:
        pass

    def _of(self, sequence: TokenSequence, count: int) -> list[int]:
        start = len(sequence.generated_ids)
        draft = self._answers[sequence.request.prompt_ids][start : start + count]
        num_right = Random(1000 * sequence.prompt_len + start).randint(0, 2 * len(draft))
        return [*draft[:num_right], *[0] * (len(draft) - num_right)]


class Ran(NamedTuple):
    answers: list[list[int]]
    states: Tensor
    """Of all slots, in all layers."""
    accepted: int


def ran(
    model: Transformer,
    prompts: Sequence[Sequence[int]],
    drafter: Drafter | None,
    sampling: SamplingParams,
    *,
    graphs: bool,
    max_running: int,
) -> Ran:
    core = EngineCore(
        model,
        device=model.head_weight.device,
        drafter=drafter,
        max_running=max_running,
        graphs=graphs,
    )
    core._speculation = Speculation(drafter, WIDTHS)  # without graphs, too
    core.warm_up()
    info = EngineInfo(
        model_id="",
        vocab_size=model.config.vocab_size,
        max_context=model.config.max_position_embeddings,
        eos_ids=model.config.eos_ids,
    )
    sequences = [
        admit(
            TokenRequest(
                request_id=str(i),
                prompt_ids=tuple(prompt),
                max_tokens=NUM_NEW,
                ignore_eos=True,
                sampling=sampling,
            ),
            info,
        )
        for i, prompt in enumerate(prompts)
    ]
    for sequence in sequences:
        core.add(sequence)
    while core.scheduler.has_work:
        core.step()
    pools = core.scheduler.memory.pools
    assert isinstance(pools, Pools)
    accepted = core.stats().accepted_tokens_total
    return Ran([s.generated_ids for s in sequences], pools.state_LSHKV, accepted)


@torch.inference_mode()
def margin(model: Transformer, prompt: Sequence[int], one: list[int], other: list[int]) -> float:
    """Between the tokens at which two greedy answers part, in parts of the largest logit."""
    at = next(i for i, (a, b) in enumerate(zip(one, other, strict=True)) if a != b)
    ids = torch.tensor([*prompt, *one[:at]], device=model.head_weight.device)
    pools = model.new_pools(slots=1, pages=2 + len(ids) // model.page_len)
    pages = range(1, 2 + len(ids) // model.page_len)
    logits_V = model.step(ids, pools, pools.step([], [Prefilling(0, pages, 0, len(ids))]))[0]
    return float((logits_V[one[at]] - logits_V[other[at]]).abs() / logits_V.abs().max())


def check_drafts(
    add: Add, name: str, model: Transformer, prompts: Sequence[Sequence[int]], tie: float
) -> None:
    """`tie`: logits closer than this may change places where several tokens are computed at once;
    in fp32 no answer may differ all the same."""
    greedy, drawn = SamplingParams(temperature=0), SamplingParams(temperature=0.8, seed=5)
    prompts = prompts[:8]
    for kind, sampling in (("greedy", greedy), ("drawn", drawn)):
        for max_running in (1, 8):
            where = f"{name}: {kind} drafts, {max_running} at a time"

            def run(drafter: Drafter | None, graphs: bool) -> Ran:
                return ran(
                    model,
                    prompts,
                    drafter,
                    sampling,  # noqa: B023
                    graphs=graphs,
                    max_running=max_running,  # noqa: B023
                )

            plain = run(None, False)
            guesses = Guesses(prompts, plain.answers)
            eager, graphed = run(guesses, False), run(guesses, True)
            same = [a == b for a, b in zip(graphed.answers, plain.answers, strict=True)]
            # Drawn tokens in bf16 part for good where one lies at the edge of its probability.
            strict = name == "float32"
            add(
                f"{where}, as without", f"{sum(same)} of {len(same)}", all(same) if strict else None
            )
            add(f"{where}, accepted", graphed.accepted, graphed.accepted > NUM_NEW)
            if kind == "greedy" and not all(same):
                widest = max(
                    margin(model, prompt, a, b)
                    for prompt, a, b in zip(prompts, graphed.answers, plain.answers, strict=True)
                    if a != b
                )
                add(f"{where}, widest margin that changed", f"{widest:.1e}", widest <= tie)
            if max_running == 1:  # else products of other shapes: rows are filled up
                same = [a == b for a, b in zip(graphed.answers, eager.answers, strict=True)]
                add(f"{where}, as without graphs", f"{sum(same)} of {len(same)}", all(same))
                gap = float((graphed.states - eager.states).abs().max() / eager.states.abs().max())
                add(f"{where}, states", f"{gap:.1e}", gap <= STATES[name])
