from __future__ import annotations

import base64
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from perilune.text import k3_names
from perilune.text.errors import TextError, TokenizerError
from perilune.text.tiktoken_ranks import (
    RankTokenizer,
    byte_level,
    byte_ranks,
    k3_style,
    load_ranks,
    save_ranks,
)

BYTES = byte_level()
literals = st.sampled_from([*k3_names.OFFSETS, "<|", "|>", "<|open|>message", "é", "\U0001f600"])
texts = st.lists(st.one_of(literals, st.text(max_size=5)), max_size=8).map("".join)


@settings(max_examples=150, deadline=None)
@given(texts)
def test_bytes_survive_and_names_stay_text(text: str) -> None:
    ids = BYTES.encode(text)
    assert BYTES.decode_bytes(ids) == text.encode()
    assert not BYTES.control_ids & set(ids)


@settings(max_examples=100, deadline=None)
@given(texts)
def test_allowed_names_become_one_id_each(text: str) -> None:
    ids = BYTES.encode(text, allow_special=True)
    assert BYTES.decode_bytes(ids) == text.encode()
    assert sum(i in BYTES.control_ids for i in ids) == sum(text.count(n) for n in k3_names.OFFSETS)


def test_merges_are_applied_by_rank(k3: RankTokenizer) -> None:
    assert [k3.token_bytes(i) for i in k3.encode("the mess the")] == [
        b"the",
        b" ",
        b"mes",
        b"s",
        b" the",
    ]


def test_release_places() -> None:
    names = k3_names.special_ids(163584)
    assert names["<|end_of_msg|>"] == 163586
    assert names["<|sep|>"] == 163589
    assert names["<|media_pad|>"] == 163605
    assert names["<osagent_mode>"] == 163649
    assert names["[PAD]"] == 163839


def test_only_markup_segments_may_be_control_tokens() -> None:
    ids = BYTES.encode_segments([("<|sep|>", True), ("<|sep|>", False), ("a<|sep|>", True)])
    sep = BYTES.special_ids["<|sep|>"]
    assert ids == [sep, *b"<|sep|>", *b"a", sep]


def test_every_reserved_id_has_bytes_and_none_beyond() -> None:
    assert all(BYTES.token_bytes(i) for i in range(BYTES.vocab_size))
    assert BYTES.vocab_size == 512
    for outside in (-1, 512):
        with pytest.raises(TextError, match="outside the vocabulary"):
            BYTES.token_bytes(outside)


@pytest.mark.parametrize("allow_special", [True, False])
def test_a_lone_surrogate_is_a_request_error(allow_special: bool) -> None:
    with pytest.raises(TextError, match=r"lone surrogate \(U\+D800\) at character 2"):
        BYTES.encode("ab\ud800", allow_special=allow_special)


def test_a_file_comes_back_unchanged(tmp_path: Path, small_ranks: dict[bytes, int]) -> None:
    save_ranks(tmp_path / "r", small_ranks)
    assert load_ranks(tmp_path / "r") == small_ranks
    assert k3_style(small_ranks).eos_ids == {len(small_ranks) + 2}


def lines(*extra: bytes) -> list[bytes]:
    ranks = [base64.b64encode(token) + b" %d" % rank for token, rank in byte_ranks().items()]
    return [*ranks, *extra]


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (lines(b"dGhl 257"), "line 257: rank 257 where 256 must stand"),
        (lines(b"dGhl 255"), "line 257: rank 255 where 256 must stand"),
        (lines(b"YQ== 256"), "line 257: token b'a' is already on line 98"),
        (lines(b"dGhl"), "line 257: expected a base64 token"),
        (lines(b"dGhl 256 1"), "line 257: expected a base64 token"),
        (lines(b"dGhl x"), "line 257: expected a base64 token"),
        (lines(b"dGhl -1"), "line 257: expected a base64 token"),
        (lines(b"d!hl 256"), "line 257: b'd!hl' is not base64"),
        (lines(b"dGhl", b"bWVz 256"), "line 257: expected a base64 token"),
        (lines(b"", b"bWVz 256"), "line 257: expected a base64 token"),
        (lines()[:255], "no token for the single byte 0xff"),
        ([], "no token for the single byte 0x00"),
    ],
)
def test_a_wrong_file_is_refused_naming_the_line(
    tmp_path: Path, content: list[bytes], message: str
) -> None:
    (tmp_path / "r").write_bytes(b"\n".join(content))
    with pytest.raises(TokenizerError, match=message.replace("(", r"\(")):
        load_ranks(tmp_path / "r")
