"""The engine on tiny models of both families: batching and chunks change no token."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from perilune.core.errors import ContextLengthError, EngineError
from perilune.core.types import SamplingParams, TokenRequest
from perilune.engine.generate import generate
from perilune.engine.opening import open_engine
from perilune.model.api import LanguageModel
from perilune.model.init import random_weights
from perilune.model.model import Transformer
from perilune.model.presets import preset
from perilune.model.save import save_checkpoint

RequestOf = Callable[..., TokenRequest]
GREEDY = SamplingParams(temperature=0)
LENGTHS = (1, 3, 17, 64, 70, 150, 5, 33)


@pytest.fixture(scope="module", params=["tiny-k3", "tiny-kimi-linear"])
def model(request: pytest.FixtureRequest) -> LanguageModel:
    generator = torch.Generator().manual_seed(5)
    return LanguageModel(random_weights(Transformer(preset(request.param)), generator))


@pytest.fixture(scope="module")
def prompts(model: LanguageModel) -> list[list[int]]:
    generator = torch.Generator().manual_seed(6)
    vocab_size = model.config.vocab_size
    return [torch.randint(vocab_size, (n,), generator=generator).tolist() for n in LENGTHS]


def test_together_equals_alone(model: LanguageModel, prompts: list[list[int]]) -> None:
    together = generate(model, prompts, max_tokens=16, ignore_eos=True, max_running=6)
    alone = [model.generate(prompt, 16, stop_ids=()) for prompt in prompts]
    assert [g.token_ids for g in together] == alone
    assert {g.finish_reason for g in together} == {"length"}


def test_a_seed_gives_the_same_tokens_together_and_alone(
    model: LanguageModel, prompts: list[list[int]]
) -> None:
    params = SamplingParams(seed=9, top_p=0.9, repetition_penalty=1.1, logprobs=3)
    together = generate(model, prompts[:5], params, max_tokens=12)
    for prompt, answer in zip(prompts[:5], together, strict=True):
        [alone] = generate(model, [prompt], params, max_tokens=12)
        assert alone.token_ids == answer.token_ids
        assert [p.logprob for p in alone.logprobs] == pytest.approx(
            [p.logprob for p in answer.logprobs], abs=1e-4
        )


def test_logprobs_are_the_models(model: LanguageModel, prompts: list[list[int]]) -> None:
    params = SamplingParams(temperature=0, logprobs=0, logit_bias={3: 2.0})
    [answer] = generate(model, [prompts[3]], params, max_tokens=6, ignore_eos=True)
    ids = prompts[3] + answer.token_ids
    logprob_TV = model.logits([ids])[0].log_softmax(-1)
    start = len(prompts[3]) - 1
    expected = [float(logprob_TV[start + i, t]) for i, t in enumerate(answer.token_ids)]
    assert [p.logprob for p in answer.logprobs] == pytest.approx(expected, abs=1e-4)


def test_a_script_hears_of_a_broken_model(prompts: list[list[int]]) -> None:
    weights = random_weights(Transformer(preset("tiny-k3")), torch.Generator().manual_seed(5))
    broken = LanguageModel(weights)
    broken.model.model.norm.weight.fill_(float("nan"))
    with pytest.raises(EngineError, match="not finite"):
        generate(broken, prompts[:1], max_tokens=2)


def test_a_served_checkpoint(
    model: LanguageModel, prompts: list[list[int]], request_of: RequestOf, tmp_path: Path
) -> None:
    directory = tmp_path / "tiny"
    save_checkpoint(model.model, directory)

    async def run() -> list[list[int | None]]:
        engine = open_engine(directory, max_running=4, prefill_budget=48, threads=1)
        assert engine.info.model_id == "tiny"
        assert engine.info.vocab_size == model.config.vocab_size
        assert engine.info.eos_ids == model.config.eos_ids
        assert engine.info.max_context == model.config.max_position_embeddings

        async def collect(prompt: list[int]) -> list[int | None]:
            request = request_of(prompt, 12, sampling=GREEDY)
            return [event.token_id async for event in engine.generate(request)]

        try:
            alone = [await collect(prompt) for prompt in prompts]
            assert await asyncio.gather(*map(collect, prompts)) == alone
            with pytest.raises(ContextLengthError):
                await collect([1] * engine.info.max_context)
        finally:
            await engine.close()
        return alone

    alone = asyncio.run(run())
    assert all(len(ids) == 12 for ids in alone)
