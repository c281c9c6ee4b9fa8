from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from perilune.text import pretokenizer
from perilune.text.pretokenizer import cut
from perilune.text.tiktoken_ranks import byte_level, byte_ranks, k3_style


def pieces(text: str) -> list[str]:
    """What the pattern splits `text` into: with a token for every substring, one token a piece."""
    data = text.encode()
    found = {data[i:j] for i in range(len(data)) for j in range(i + 2, len(data) + 1)}
    ranks = byte_ranks()
    for token in sorted(found, key=lambda token: (len(token), token)):
        ranks[token] = len(ranks)
    tokenizer = k3_style(ranks)
    return [tokenizer.token_bytes(i).decode() for i in tokenizer.encode(text)]


@pytest.mark.parametrize(
    "expected",
    [
        ["Hello", " world"],
        ["Hello", "World"],
        ["HTTPServer"],
        ["don't", " DON'T", " we'LL"],
        ["it's", "'x"],
        ["中国", "abc", "漢字"],
        [" ", "中国"],
        ["(", "中"],
        ["#tag", "(x", ")"],
        ["a", "123", "45٣", "6"],
        [" !!\n\n", "x"],
        ["a", "\n \n", " b"],
        ["a", "  ", " b"],
        ["a", "   "],
        ["a", "\t", "\tb"],
        ["x", "\r\n", "y"],
        ["e\u0301x"],
        ["ǅabc", " ªb"],
    ],
)
def test_the_alternatives(expected: list[str]) -> None:
    assert pieces("".join(expected)) == expected


@pytest.mark.parametrize(
    ("text", "lengths"),
    [
        ("", []),
        ("a" * 25_000, [25_000]),
        ("a" * 25_001, [25_000, 1]),
        (" " * 50_001, [25_000, 25_000, 1]),
        ("b " + "a" * 60_000 + " c", [2 + 25_000, 25_000, 10_000 + 2]),
        ("ab " * 200_000, [400_000, 200_000]),
        ("a " * 200_000 + "a" * 25_001, [400_000, 25_000, 1]),
        # A run starts anew at each cut of 400,000: only 20,000 of these 40,000 lie in each piece.
        (("a " * 190_000) + "b" * 40_000, [400_000, 20_000]),
    ],
)
def test_cuts(text: str, lengths: list[int]) -> None:
    found = list(cut(text))
    assert [len(piece) for piece in found] == lengths
    assert "".join(found) == text


@settings(max_examples=200, deadline=None)
@given(st.lists(st.tuples(st.sampled_from("a \n\u2003é"), st.integers(1, 40)), max_size=12))
def test_cuts_in_small(runs: list[tuple[str, int]]) -> None:
    text = "".join(char * count for char, count in runs)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(pretokenizer, "MAX_PIECE_CHARS", 60)
        patch.setattr(pretokenizer, "MAX_RUN_CHARS", 10)
        assert list(cut(text)) == _cut_by_character(text, 60, 10)


def _cut_by_character(text: str, max_piece: int, max_run: int) -> list[str]:
    """The rule as a counter: a cut before the character that would make a run too long."""
    found: list[str] = []
    for start in range(0, len(text), max_piece):
        current, run = "", 0
        for char in text[start : start + max_piece]:
            same = current and current[-1].isspace() == char.isspace()
            run = run + 1 if same else 1
            if run > max_run:
                found.append(current)
                current, run = "", 1
            current += char
        found.append(current)
    return found


def test_cuts_change_tokens_as_in_the_release() -> None:
    ranks = byte_ranks()
    ranks[b"aa"] = 256
    ids = k3_style(ranks).encode("a" * 25_001)
    assert ids == [256] * 12_500 + [ord("a")]


def test_long_runs_are_quick() -> None:
    text = " " * 300_000 + "a" * 300_000
    assert len(byte_level().encode(text)) == len(text)
