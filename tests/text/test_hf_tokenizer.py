from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import decoders, models, pre_tokenizers, processors, trainers

from perilune.core.errors import UnsupportedError
from perilune.text.errors import TextError, TokenizerError
from perilune.text.hf_tokenizer import HfTokenizer, load_hf

CORPUS = ["the cat sat on the mat, the cat <|end|>"] * 4


def train() -> tokenizers.Tokenizer:
    model = tokenizers.Tokenizer(models.BPE())
    model.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    model.decoder = decoders.ByteLevel()
    model.train_from_iterator(
        CORPUS,
        trainers.BpeTrainer(
            vocab_size=300,
            initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
            special_tokens=["<|end|>"],
            show_progress=False,
        ),
    )
    model.add_tokens(["<think>", tokenizers.AddedToken("\n\n\n\n", normalized=False)])
    model.post_processor = processors.TemplateProcessing(
        single="<|end|> $A", special_tokens=[("<|end|>", 0)]
    )
    return model


LIBRARY = train()
SPEC: dict[str, Any] = json.loads(LIBRARY.to_str())
OURS = HfTokenizer(SPEC, ["<|end|>", "[EOS]"], where="tokenizer.json")
texts = st.lists(
    st.one_of(
        st.sampled_from(["<|end|>", "<think>", "the cat", " mat", "\n\n\n\n"]), st.text(max_size=4)
    ),
    max_size=6,
).map("".join)


@settings(max_examples=100, deadline=None)
@given(texts)
def test_bytes_survive_and_names_stay_text(text: str) -> None:
    ids = OURS.encode(text)
    assert OURS.decode_bytes(ids) == text.encode()
    assert not OURS.control_ids & set(ids)


@settings(max_examples=100, deadline=None)
@given(texts)
def test_allowed_names_give_the_librarys_ids(text: str) -> None:
    ids = OURS.encode(text, allow_special=True)
    assert ids == LIBRARY.encode(text, add_special_tokens=False).ids
    assert OURS.decode_bytes(ids) == text.encode()


def test_places() -> None:
    assert OURS.eos_ids == {0}
    assert OURS.special_ids.keys() == {"<|end|>", "<think>"}
    assert OURS.vocab_size == LIBRARY.get_vocab_size()
    with pytest.raises(TextError, match="not in the vocabulary"):
        OURS.token_bytes(OURS.vocab_size)
    with pytest.raises(TextError, match="lone surrogate"):
        OURS.encode("\udc00")


def test_a_whole_name_in_the_vocabulary_is_still_text() -> None:
    spec = {**SPEC, "model": {**SPEC["model"], "ignore_merges": True}, "pre_tokenizer": None}
    ids = HfTokenizer(spec, [], where="t").encode("<|end|>")
    assert 0 not in ids
    assert len(ids) > 1


@pytest.mark.parametrize(
    ("content", "error", "message"),
    [
        ("{", TokenizerError, "not JSON"),
        ("[]", TokenizerError, "no tokenizer model"),
        ("{}", TokenizerError, "no tokenizer model"),
        (
            '{"model": {"type": "BPE"}, "decoder": {"type": "ByteLevel"}}',
            TokenizerError,
            "no vocab",
        ),
        (json.dumps({**SPEC, "added_tokens": [{"id": 1}]}), TokenizerError, "no content or no id"),
        (
            json.dumps({**SPEC, "model": {**SPEC["model"], "vocab": {"中": 0}}}),
            TokenizerError,
            "'中' is not written in bytes",
        ),
        (json.dumps({**SPEC, "decoder": None}), UnsupportedError, "only byte-level BPE"),
        (json.dumps({**SPEC, "pre_tokenizer": {"type": "No"}}), TokenizerError, "t.json"),
    ],
)
def test_a_wrong_file_is_refused(
    tmp_path: Path, content: str, error: type[Exception], message: str
) -> None:
    path = tmp_path / "t.json"
    path.write_text(content)
    with pytest.raises(error, match=message):
        load_hf(path, [])
