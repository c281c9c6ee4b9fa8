from __future__ import annotations

from itertools import pairwise

from hypothesis import given, settings
from hypothesis import strategies as st

from perilune.text.detokenizer import Detokenizer, Utf8Stream
from perilune.text.tiktoken_ranks import RankTokenizer, byte_level

noisy_bytes = st.lists(
    st.one_of(st.text(max_size=3).map(str.encode), st.binary(max_size=4)), max_size=10
).map(b"".join)


@settings(max_examples=300, deadline=None)
@given(noisy_bytes, st.lists(st.integers(0, 40), max_size=6))
def test_any_split_equals_one_decode(data: bytes, cuts: list[int]) -> None:
    stream = Utf8Stream()
    places = [0, *sorted(min(cut, len(data)) for cut in cuts), len(data)]
    shown = [stream.push(data[a:b]) for a, b in pairwise(places)]
    assert "".join(shown) + stream.flush() == data.decode("utf-8", errors="replace")


def test_a_code_point_comes_out_whole() -> None:
    detokenizer = Detokenizer(byte_level())
    assert [detokenizer.feed(byte) for byte in "a😀".encode()] == ["a", "", "", "", "😀"]
    assert detokenizer.flush() == ""


def test_a_cut_code_point_is_not_lost() -> None:
    detokenizer = Detokenizer(byte_level())
    assert "".join(map(detokenizer.feed, "é".encode()[:1])) == ""
    assert detokenizer.flush() == "\ufffd"
    assert detokenizer.flush() == ""


def test_control_tokens_are_left_out(k3: RankTokenizer) -> None:
    ids = [*k3.encode("a"), k3.special_ids["<|sep|>"], k3.num_ranks + 44, *k3.encode("b")]
    assert "".join(map(Detokenizer(k3).feed, ids)) == "ab"
