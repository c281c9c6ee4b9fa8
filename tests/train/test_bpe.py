"""The trained BPE: exact size, all bytes, round trips, and the same ids in both engines."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from perilune.core.errors import ConfigError
from perilune.text.tiktoken_ranks import k3_style, load_ranks
from perilune.train import bpe
from perilune.train.document import Document
from perilune.train.synthetic.generate import generate

NUM_RANKS = 700


@pytest.fixture(scope="module")
def texts():
    return bpe.sample(generate(60_000, seed=5), dict.fromkeys(bpe.SAMPLE_BYTES, 200_000))


@pytest.fixture(scope="module")
def trained(texts):
    return bpe.train_bpe(texts, NUM_RANKS)


@pytest.fixture(scope="module")
def tokenizer(trained, tmp_path_factory):
    folder = tmp_path_factory.mktemp("tokenizer")
    bpe.write_tokenizer(folder, bpe.ranks_of(trained))
    return k3_style(load_ranks(folder / "tiktoken.model"))


def test_the_rank_file_has_the_wanted_size_and_every_byte(tokenizer, trained):
    ranks = bpe.ranks_of(trained)
    assert len(ranks) == NUM_RANKS
    assert sorted(ranks.values()) == list(range(NUM_RANKS))
    assert {bytes([value]) for value in range(256)} <= set(ranks)
    assert tokenizer.vocab_size == NUM_RANKS + 256


def test_the_configuration_names_the_control_tokens(trained, tmp_path):
    bpe.write_tokenizer(tmp_path, bpe.ranks_of(trained))
    config = json.loads((tmp_path / "tokenizer_config.json").read_text())
    names = {entry["content"]: int(i) for i, entry in config["added_tokens_decoder"].items()}
    assert names["[EOS]"] == NUM_RANKS + 1
    assert names["<|end_of_msg|>"] == NUM_RANKS + 2
    assert names["[PAD]"] == NUM_RANKS + 255


def test_both_engines_agree(tokenizer, trained, texts):
    for text in texts[:200]:
        assert tokenizer.encode(text) == trained.encode(text).ids


@given(st.text())
def test_any_text_comes_back(tokenizer, text):
    assert tokenizer.decode(tokenizer.encode(text)) == text


def test_text_gets_shorter(tokenizer, texts):
    num_bytes = sum(len(text.encode()) for text in texts)
    num_tokens = sum(len(tokenizer.encode(text)) for text in texts)
    assert num_tokens < 0.5 * num_bytes


def test_the_sample_keeps_to_its_limits():
    documents = [Document(kind="code", source="x", text=f"{i:05}" * 20) for i in range(100)]
    texts = bpe.sample(documents, dict.fromkeys(bpe.SAMPLE_BYTES, 1_050))
    assert len(texts) == 10


def test_too_little_text_is_refused():
    with pytest.raises(ConfigError, match="tokens"):
        bpe.train_bpe(["abc abc"], 5000)
