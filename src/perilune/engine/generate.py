"""The engine's door for scripts: prompts in, token ids out, no event loop."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from perilune.core.errors import EngineError
from perilune.core.types import EngineInfo, FinishReason, SamplingParams, TokenLogprob, TokenRequest
from perilune.engine.admission import admit
from perilune.engine.cache_sizes import cost_of, default_bytes
from perilune.engine.core import EngineCore
from perilune.engine.pooled_memory import Room
from perilune.engine.sequence import TokenSequence
from perilune.model.api import LanguageModel

GREEDY = SamplingParams(temperature=0)


class Generated(NamedTuple):
    token_ids: list[int]
    finish_reason: FinishReason
    logprobs: list[TokenLogprob]
    """One a token when the parameters ask for them, else empty."""


def generate(
    model: LanguageModel,
    prompts: Sequence[Sequence[int]],
    params: SamplingParams = GREEDY,
    *,
    max_tokens: int,
    stop_ids: frozenset[int] = frozenset(),
    ignore_eos: bool = False,
    max_running: int = 32,
) -> list[Generated]:
    """Continues every prompt by at most `max_tokens` ids, all of them in flight together.

    A given seed serves every prompt: equal prompts get equal answers.

    Raises:
        ContextLengthError, RequestError: a prompt or a parameter is wrong; nothing has run.
        EngineError: the model gave logits that are not finite.
    """
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
                max_tokens=max_tokens,
                sampling=params,
                stop_ids=stop_ids,
                ignore_eos=ignore_eos,
            ),
            info,
        )
        for i, prompt in enumerate(prompts)
    ]
    core = EngineCore(
        model.model,
        room=_room(sequences, model, max_running),
        device=model.device,
        max_running=max_running,
        max_waiting=len(sequences),
    )
    return _run(core, sequences)


def _room(sequences: Sequence[TokenSequence], model: LanguageModel, max_running: int) -> Room:
    """For the largest that can run together; less where that would be more than an engine takes
    (few answers are as long as they may be)."""
    page_len, cost = model.model.page_len, cost_of(model.model)
    lengths = sorted((s.prompt_len + s.max_tokens for s in sequences), reverse=True)[:max_running]
    num_pages = [-(-length // page_len) for length in lengths]
    num_bytes = default_bytes(model.device, cost, len(lengths), max(lengths, default=1))
    most = max(num_bytes // (page_len * cost.row_bytes), *num_pages[:1], 1)
    return Room(1 + min(max(sum(num_pages), 1), most), max(len(lengths), 1))


def _run(core: EngineCore, sequences: Sequence[TokenSequence]) -> list[Generated]:
    logprobs: dict[TokenSequence, list[TokenLogprob]] = {s: [] for s in sequences}
    for sequence in sequences:
        core.add(sequence)
    while core.scheduler.has_work:
        for sequence, event in core.step():
            if event.error is not None:
                raise EngineError(event.error)
            if event.logprob is not None:
                logprobs[sequence].append(event.logprob)
    return [_generated(sequence, logprobs[sequence]) for sequence in sequences]


def _generated(sequence: TokenSequence, logprobs: list[TokenLogprob]) -> Generated:
    assert sequence.finish_reason is not None
    return Generated(sequence.generated_ids, sequence.finish_reason, logprobs)
