from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from perilune.core.errors import UnsupportedError
from perilune.core.types import ChatRequest, Message, TextPart
from perilune.text import im_names, k3_names
from perilune.text.errors import TokenizerError
from perilune.text.im_format import ImFormat
from perilune.text.load import load_chat_format, load_tokenizer
from perilune.text.tiktoken_ranks import RankTokenizer, byte_ranks, save_ranks
from perilune.text.xtml_format import XtmlFormat


def write(directory: Path, config: dict[str, Any] | str | None) -> Path:
    save_ranks(directory / "tiktoken.model", byte_ranks())
    if config is not None:
        text = config if isinstance(config, str) else json.dumps(config)
        (directory / "tokenizer_config.json").write_text(text)
    return directory


def named(special_ids: dict[str, int], **more: Any) -> dict[str, Any]:
    added = {str(i): {"content": name, "special": True} for name, i in special_ids.items()}
    return {"added_tokens_decoder": added, **more}


def test_k3(tmp_path: Path) -> None:
    directory = write(tmp_path, k3_names.tokenizer_config(256))
    tokenizer = load_tokenizer(directory)
    assert isinstance(tokenizer, RankTokenizer)
    assert tokenizer.special_ids == k3_names.special_ids(256)
    assert tokenizer.eos_ids == {258}
    assert isinstance(load_chat_format(directory), XtmlFormat)


def test_kimi_linear(tmp_path: Path) -> None:
    directory = write(tmp_path, named(im_names.special_ids(256), eos_token="[EOS]"))
    tokenizer = load_tokenizer(directory)
    assert tokenizer.eos_ids == {258}
    assert "<|open|>" not in tokenizer.special_ids
    chat = load_chat_format(directory, tokenizer)
    assert isinstance(chat, ImFormat)
    assert chat.tokenizer is tokenizer


def test_a_base_model_ends_with_its_eos_token(tmp_path: Path) -> None:
    directory = write(tmp_path, named({"[EOS]": 257}, eos_token={"content": "[EOS]"}))
    assert load_tokenizer(directory).eos_ids == {257}
    with pytest.raises(UnsupportedError, match="no chat format"):
        load_chat_format(directory)


@pytest.mark.parametrize(
    ("key", "level"), [({}, "max"), ({"default_thinking_effort": "low"}, "low")]
)
def test_the_default_effort(tmp_path: Path, key: dict[str, str], level: str) -> None:
    config = k3_names.tokenizer_config(256)
    del config["default_thinking_effort"]
    chat = load_chat_format(write(tmp_path, {**config, **key}))
    user = Message(role="user", content=(TextPart(text="u"),))
    ids = chat.encode(ChatRequest(request_id="r", model="m", messages=(user,)))
    assert f"thinking_effort={level}`" in chat.tokenizer.decode(ids)


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (None, "tokenizer_config.json is missing"),
        ("{", "not JSON"),
        ("[" * 100_000, "not JSON"),
        ("[]", "not a JSON object"),
        ({}, "no added_tokens_decoder"),
        (
            named({"<|open|>": 163587}),
            "<|open|> has id 163587, but 256 ranks leave the ids 256 to 511",
        ),
        (named({"<|open|>": 3}), "<|open|> has id 3"),
        ({"added_tokens_decoder": {"x": {"content": "a"}}}, "'x'] names no token"),
        ({"added_tokens_decoder": {"256": "a"}}, "'256'] names no token"),
        (named({"<|open|>": 259}), "no token that ends a message"),
    ],
)
def test_a_wrong_configuration_is_refused(
    tmp_path: Path, config: dict[str, Any] | str | None, message: str
) -> None:
    with pytest.raises(TokenizerError) as caught:
        load_tokenizer(write(tmp_path, config))
    assert message in str(caught.value)


def test_one_name_with_two_ids_is_refused(tmp_path: Path) -> None:
    added = {"256": {"content": "<|end_of_msg|>"}, "257": {"content": "<|end_of_msg|>"}}
    with pytest.raises(TokenizerError, match="has the ids 256 and 257"):
        load_tokenizer(write(tmp_path, {"added_tokens_decoder": added}))


def test_two_formats_at_once_are_refused(tmp_path: Path) -> None:
    mixed = k3_names.special_ids(256) | {
        name: 400 + i for i, name in enumerate(sorted(im_names.REQUIRED))
    }
    with pytest.raises(TokenizerError, match="two chat formats"):
        load_chat_format(write(tmp_path, named(mixed)))


def test_a_wrong_level_is_refused(tmp_path: Path) -> None:
    config = {**k3_names.tokenizer_config(256), "default_thinking_effort": "huge"}
    with pytest.raises(TokenizerError, match="'huge' is no level"):
        load_chat_format(write(tmp_path, config))


def test_an_empty_directory_has_no_tokenizer(tmp_path: Path) -> None:
    with pytest.raises(TokenizerError, match="no tokenizer"):
        load_tokenizer(tmp_path)


def test_tokenizer_json_alone(tmp_path: Path) -> None:
    spec = {
        "added_tokens": [{"content": "<|im_end|>", "id": 2, "special": True}],
        "decoder": {
            "type": "ByteLevel",
            "add_prefix_space": False,
            "trim_offsets": True,
            "use_regex": True,
        },
        "model": {"type": "BPE", "vocab": {"a": 0, "b": 1, "<|im_end|>": 2}, "merges": []},
    }
    (tmp_path / "tokenizer.json").write_text(json.dumps(spec))
    tokenizer = load_tokenizer(tmp_path)
    assert tokenizer.encode("ab") == [0, 1]
    assert tokenizer.eos_ids == {2}


def test_the_room_starts_without_torch() -> None:
    modules = "load, xtml_parser, im_parser, detokenizer, stop, hf_tokenizer"
    shown = "'torch' in sys.modules, 'tokenizers' in sys.modules"
    code = f"import sys; from perilune.text import {modules}; print({shown})"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["False", "False"]
