"""`perilune.load_model`: logits and generation from Python."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

import perilune
from perilune.core.errors import (
    CheckpointError,
    ConfigError,
    ContextLengthError,
    RequestError,
    UnsupportedError,
)
from perilune.model.api import LanguageModel
from perilune.model.init import random_weights
from perilune.model.model import Transformer
from perilune.model.parse_config import parse_config
from perilune.model.presets import tiny_k3, tiny_kimi_linear
from perilune.model.save import save_checkpoint

PROMPT = [5, 9, 33, 2, 77]


@pytest.fixture(scope="module")
def directory(tmp_path_factory):
    raw = tiny_k3(mxfp4=True, max_position_embeddings=64)
    model = random_weights(Transformer(parse_config(raw)), torch.Generator().manual_seed(1))
    path = tmp_path_factory.mktemp("api") / "model"
    save_checkpoint(model, path)
    return str(path)


@pytest.fixture(scope="module")
def model(directory) -> LanguageModel:
    return perilune.load_model(directory)


def test_logits_accept_lists_arrays_and_tensors(model):
    wanted = model.logits([PROMPT, PROMPT[::-1]])
    assert wanted.shape == (2, 5, model.config.vocab_size)
    assert wanted.dtype == torch.float32
    block = np.array([PROMPT, PROMPT[::-1]], dtype=np.uint16)
    assert torch.equal(model.logits(block), wanted)
    assert torch.equal(model.logits(torch.tensor(block.astype(np.int32))), wanted)


def test_rows_are_independent(model):
    both = model.logits([PROMPT, PROMPT[::-1]])
    alone = model.logits([PROMPT])
    assert torch.allclose(both[:1], alone, atol=1e-5)


def test_greedy_generation_is_the_argmax_of_the_logits(model):
    out = model.generate(PROMPT, 12, stop_ids=())
    assert len(out) == 12
    best = model.logits([PROMPT + out])[0].argmax(-1).tolist()
    assert best[len(PROMPT) - 1 : -1] == out


def test_generation_stops_after_a_stop_id(model):
    free = model.generate(PROMPT, 12, stop_ids=())
    stop = free[4]
    first = free.index(stop)
    assert model.generate(PROMPT, 12, stop_ids=[stop]) == free[: first + 1]


def test_the_configurations_eos_stops_by_default(directory, model):
    free = model.generate(PROMPT, 6, stop_ids=())
    other = perilune.load_model(directory)
    other.model.config = replace(other.config, eos_token_id=(127, free[2]))
    assert other.generate(PROMPT, 6) == free[: free.index(free[2]) + 1]


def test_a_seed_repeats_and_another_differs(model):
    draw = [model.generate(PROMPT, 20, temperature=1.5, seed=s, stop_ids=()) for s in (1, 1, 2)]
    assert draw[0] == draw[1] != draw[2]
    free = {tuple(model.generate(PROMPT, 20, temperature=1.5, stop_ids=())) for _ in range(3)}
    assert len(free) == 3


def test_a_tiny_temperature_is_greedy(model):
    greedy = model.generate(PROMPT, 12, stop_ids=())
    assert model.generate(PROMPT, 12, temperature=1e-300, seed=3, stop_ids=()) == greedy


@pytest.mark.parametrize(
    ("ids", "message"),
    [
        ([[0, 128]], "token id 128 is outside 0..127"),
        ([[-1]], "token id -1 is outside"),
        ([[]], "at least one token"),
        ([[0.5]], "must be integers"),
        ([[True]], "must be integers"),
        ([1, 2], "two dimensions"),
        ([[1, 2], [3]], "block of integers"),
        ([["a"]], "block of integers"),
        ([[2**70]], "block of integers"),
        (None, "block of integers"),
    ],
)
def test_bad_ids_are_refused(model, ids, message):
    with pytest.raises(RequestError, match=message):
        model.logits(ids)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"prompt_ids": []}, "at least one token"),
        ({"prompt_ids": [[1]]}, "one dimension"),
        ({"max_tokens": 0}, "max_tokens must be at least 1"),
        ({"max_tokens": 1.5}, "max_tokens must be at least 1, an integer"),
        ({"max_tokens": float("nan")}, "max_tokens must be at least 1, an integer"),
        ({"seed": 2**64}, "seed must be an integer of 64 bits"),
        ({"seed": 0.5}, "seed must be an integer of 64 bits"),
        ({"temperature": -1.0}, "temperature must be"),
        ({"temperature": float("nan")}, "temperature must be"),
    ],
)
def test_bad_generation_arguments_are_refused(model, arguments, message):
    with pytest.raises(RequestError, match=message):
        model.generate(**{"prompt_ids": PROMPT, "max_tokens": 3, **arguments})


def test_the_context_is_a_limit(model):
    assert len(model.generate([1] * 60, 4, stop_ids=())) == 4
    with pytest.raises(ContextLengthError, match=r"65 tokens exceed .* 64"):
        model.generate([1] * 60, 5)
    with pytest.raises(ContextLengthError):
        model.logits([[1] * 65])


def test_bf16_is_close_to_fp32(directory, model):
    half = perilune.load_model(directory, dtype="bfloat16").logits([PROMPT])
    full = model.logits([PROMPT])
    assert half.dtype == torch.float32
    assert (half - full).abs().mean() < 0.1 * full.abs().mean()


def test_the_other_family_loads_by_the_same_call(tmp_path):
    raw = tiny_kimi_linear(tie_word_embeddings=True)
    model = random_weights(Transformer(parse_config(raw)), torch.Generator().manual_seed(1))
    save_checkpoint(model, tmp_path / "a")
    loaded = perilune.load_model(str(tmp_path / "a"))
    assert loaded.config.family == "kimi_linear"
    assert len(loaded.generate(PROMPT, 3, stop_ids=())) == 3


def test_what_cannot_be_loaded_says_why(directory, tmp_path):
    with pytest.raises(UnsupportedError, match="dtype must be one of"):
        perilune.load_model(directory, dtype="int4")
    with pytest.raises(UnsupportedError, match="device 'nosuch'"):
        perilune.load_model(directory, device="nosuch")
    with pytest.raises(ConfigError, match="does not exist"):
        perilune.load_model(str(tmp_path))
    (tmp_path / "config.json").write_bytes((Path(directory) / "config.json").read_bytes())
    with pytest.raises(CheckpointError, match="holds neither"):
        perilune.load_model(str(tmp_path))
