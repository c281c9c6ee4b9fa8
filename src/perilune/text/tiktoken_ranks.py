"""Rank files of the tiktoken kind (`tiktoken.model`): BPE tokens by rank, then 256 reserved ids."""

from __future__ import annotations

import base64
import binascii
from collections.abc import Iterable, Mapping
from functools import lru_cache
from pathlib import Path

import tiktoken

from perilune.text import k3_names
from perilune.text.errors import TextError, TokenizerError
from perilune.text.pretokenizer import PATTERN, cut
from perilune.text.tokenizer import SegmentCodec, check_encodable

_MAX_REMEMBERED_CHARS = 16


class RankTokenizer(SegmentCodec):
    """BPE over byte ranks 0..N-1, with control tokens among the reserved ids N..N+255."""

    def __init__(
        self, ranks: Mapping[bytes, int], special_ids: Mapping[str, int], eos_ids: Iterable[int]
    ) -> None:
        """`ranks` must hold every single byte; `special_ids` must lie in N..N+255."""
        self.num_ranks = len(ranks)
        self.special_ids = dict(special_ids)
        self.eos_ids = frozenset(eos_ids)
        self.control_ids = frozenset(range(self.num_ranks, self.vocab_size))
        self._special_names = frozenset(special_ids)
        reserved = _all_reserved(self.num_ranks, special_ids)
        self._encoding = tiktoken.Encoding(
            "perilune",
            pat_str=PATTERN,
            mergeable_ranks=dict(ranks),
            special_tokens=reserved,
        )
        self._token_bytes = {rank: token for token, rank in ranks.items()}
        self._token_bytes |= {token_id: name.encode() for name, token_id in reserved.items()}
        # A chat prompt is mostly the same few tag and attribute names.
        self._encode_short = lru_cache(maxsize=4096)(self._encode_ordinary)

    @property
    def vocab_size(self) -> int:
        return self.num_ranks + k3_names.NUM_RESERVED

    def encode(self, text: str, *, allow_special: bool = False) -> list[int]:
        if not allow_special:
            short = len(text) <= _MAX_REMEMBERED_CHARS
            return [*(self._encode_short(text) if short else self._encode_ordinary(text))]
        check_encodable(text)
        names = self._special_names
        return [
            token_id
            for piece in cut(text)
            for token_id in self._encoding.encode(
                piece, allowed_special=names, disallowed_special=()
            )
        ]

    def _encode_ordinary(self, text: str) -> list[int]:
        check_encodable(text)
        ordinary = self._encoding.encode_ordinary
        return [token_id for piece in cut(text) for token_id in ordinary(piece)]

    def token_bytes(self, token_id: int) -> bytes:
        data = self._token_bytes.get(token_id)
        if data is None:
            raise TextError(f"token id {token_id} is outside the vocabulary of {self.vocab_size}")
        return data


def _all_reserved(num_ranks: int, special_ids: Mapping[str, int]) -> dict[str, int]:
    """A name for every reserved id, so that each of them decodes to something."""
    names = {num_ranks + i: f"<|reserved_{i}|>" for i in range(k3_names.NUM_RESERVED)}
    names |= {token_id: name for name, token_id in special_ids.items()}
    return {name: token_id for token_id, name in names.items()}


def load_ranks(path: Path) -> dict[bytes, int]:
    """Reads a rank file: line i is a token in base64, a space and the rank i.

    Raises:
        TokenizerError: a malformed line, a gap, a duplicate or a single byte that has no token.
    """
    ranks: dict[bytes, int] = {}
    for number, line in enumerate(path.read_bytes().splitlines(), start=1):
        token = _parse_line(line, expected_rank=number - 1, where=f"{path}, line {number}")
        if token in ranks:
            raise TokenizerError(
                f"{path}, line {number}: token {token!r} is already on line {ranks[token] + 1}"
            )
        ranks[token] = number - 1
    missing = [value for value in range(256) if bytes([value]) not in ranks]
    if missing:
        raise TokenizerError(f"{path}: no token for the single byte 0x{missing[0]:02x}")
    return ranks


def _parse_line(line: bytes, *, expected_rank: int, where: str) -> bytes:
    fields = line.split(b" ")
    if len(fields) != 2 or not fields[0] or not fields[1].isdigit():
        raise TokenizerError(f"{where}: expected a base64 token, a space and a rank, got {line!r}")
    if int(fields[1]) != expected_rank:
        kind = "a gap" if int(fields[1]) > expected_rank else "a repeated rank"
        raise TokenizerError(
            f"{where}: rank {int(fields[1])} where {expected_rank} must stand ({kind})"
        )
    try:
        return binascii.a2b_base64(fields[0], strict_mode=True)
    except binascii.Error as error:
        raise TokenizerError(f"{where}: {fields[0]!r} is not base64") from error


def save_ranks(path: Path, ranks: Mapping[bytes, int]) -> None:
    """Writes a rank file that `load_ranks` reads back unchanged."""
    lines = (
        base64.b64encode(token) + b" %d\n" % rank
        for token, rank in sorted(ranks.items(), key=lambda item: item[1])
    )
    path.write_bytes(b"".join(lines))


def byte_ranks() -> dict[bytes, int]:
    """The smallest rank table: byte b has rank b, and nothing merges."""
    return {bytes([value]): value for value in range(256)}


def k3_style(ranks: Mapping[bytes, int]) -> RankTokenizer:
    """A tokenizer of these ranks with K3's control tokens behind them."""
    special_ids = k3_names.special_ids(len(ranks))
    return RankTokenizer(ranks, special_ids, [special_ids[k3_names.END_OF_MSG]])


def byte_level() -> RankTokenizer:
    """One id a byte (0..255) and K3's control tokens at 256..511: for tests and first models."""
    return k3_style(byte_ranks())
