"""A small K3-style tokenizer: all bytes, a few merges, and K3's control tokens behind them."""

from __future__ import annotations

import pytest

from perilune.text.tiktoken_ranks import RankTokenizer, byte_ranks, k3_style
from perilune.text.xtml_format import XtmlFormat

MERGES = (b"me", b"mes", b"th", b"the", b" the", b"es", b'="', b"\xe4\xb8", b"<|", b"|>", b"call")


@pytest.fixture(scope="session")
def small_ranks() -> dict[bytes, int]:
    ranks = byte_ranks()
    for token in MERGES:
        ranks[token] = len(ranks)
    return ranks


@pytest.fixture(scope="session")
def k3(small_ranks: dict[bytes, int]) -> RankTokenizer:
    return k3_style(small_ranks)


@pytest.fixture(scope="session")
def xtml(k3: RankTokenizer) -> XtmlFormat:
    return XtmlFormat(k3)
