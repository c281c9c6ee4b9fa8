"""Stand-ins for what a command opens, and a real checkpoint of the smallest size."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from perilune.cli import chat, generate
from perilune.cli.local_model import OpenModel
from perilune.core.fakes import FakeEngine
from perilune.core.types import Message, TextPart
from perilune.gateway.backends.local import LocalModel
from perilune.text.k3_names import tokenizer_config
from perilune.text.tiktoken_ranks import byte_level, byte_ranks, save_ranks
from perilune.text.xtml_format import XtmlFormat


@pytest.fixture
def engine(monkeypatch) -> FakeEngine:
    """What `generate` and `chat` get instead of a checkpoint's engine."""
    engine = FakeEngine()
    model = LocalModel(engine, XtmlFormat(byte_level()))
    for command in (generate, chat):
        monkeypatch.setattr(command, "open_model", lambda *args, **kwargs: OpenModel(model, engine))
    return engine


@pytest.fixture(scope="session")
def answer_ids() -> Callable[..., list[int]]:
    """What a model writes for an answer, control tokens included."""

    def answer_ids(text: str, reasoning: str = "") -> list[int]:
        answer = Message(role="assistant", content=(TextPart(text=text),), reasoning=reasoning)
        turn = (Message(role="user", content=(TextPart(text="?"),)), answer)
        both = XtmlFormat(byte_level()).encode_conversation(turn)
        return [token for token, written in zip(both.ids, both.loss_mask, strict=True) if written]

    return answer_ids


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory) -> Path:
    """A K3 of 0.2 M random parameters with a byte tokenizer."""
    import torch

    from perilune.model.init import random_weights
    from perilune.model.model import Transformer
    from perilune.model.parse_config import parse_config
    from perilune.model.presets import tiny_k3
    from perilune.model.save import save_checkpoint

    tokenizer = byte_level()
    (eos_id,) = tokenizer.eos_ids
    raw = tiny_k3(vocab_size=tokenizer.vocab_size) | {"eos_token_id": eos_id}
    model = Transformer(parse_config(raw, "tiny"))
    directory = tmp_path_factory.mktemp("models") / "tiny"
    save_checkpoint(
        random_weights(model, torch.Generator().manual_seed(0)), directory, raw_config=raw
    )
    save_ranks(directory / "tiktoken.model", byte_ranks())
    config = json.dumps(tokenizer_config(tokenizer.num_ranks))
    (directory / "tokenizer_config.json").write_text(config)
    return directory
