"""Packed batches out of token shards: whole documents in rows, by mixture weights, resumable.

Only numpy and the standard library, so that it runs wherever the shards are.

Shapes: B rows of a batch, L tokens of a row.
"""

from __future__ import annotations

import bisect
import zlib
from collections.abc import Iterator, Mapping
from typing import NamedTuple, TypedDict

import numpy as np
import numpy.typing as npt

from perilune.core.errors import ConfigError
from perilune.train.shards import Shard

IGNORED = -100
PADDING = -1
_POOL_PIECES = 512
_MIN_FIRST_PIECE = 64


class Batch(NamedTuple):
    inputs_BL: npt.NDArray[np.int64]
    targets_BL: npt.NDArray[np.int64]
    """The next token of the same document; IGNORED where there is none."""
    segments_BL: npt.NDArray[np.int32]
    """Number of the piece within its row, from 0; PADDING at a row's end."""


class Piece(NamedTuple):
    """`shard.tokens[start:stop]`; `is_end` when its last token has no successor to predict."""

    kind: str
    start: int
    stop: int
    is_end: bool


class Cursor(TypedDict):
    """The place of a `PackedLoader` in its shards, in JSON values."""

    streams: dict[str, tuple[int, int, int]]
    """Of each kind: epoch, pieces drawn in it, tokens drawn in all."""
    pool: list[tuple[int, str, int, int, bool]]
    """Age and fields of each `Piece` that waits for a row."""
    next_age: int


class _PieceTable(NamedTuple):
    starts: npt.NDArray[np.int64]
    stops: npt.NDArray[np.int64]
    is_ends: npt.NDArray[np.bool_]


def cut_pieces(
    offsets: npt.NDArray[np.int64], row_len: int, rng: np.random.Generator | None
) -> _PieceTable:
    """Pieces of at most `row_len` tokens that cover every document exactly once, in order.

    With `rng` the first cut of a long document is drawn, so that epochs cut at different places.
    """
    begins, ends = offsets[:-1], offsets[1:]
    lens = ends - begins
    firsts = np.minimum(lens, row_len)
    if rng is not None:
        low = min(_MIN_FIRST_PIECE, row_len)
        drawn = rng.integers(low, row_len + 1, size=len(lens))
        firsts = np.where(lens > row_len, drawn, firsts)
    counts = 1 + -(-(lens - firsts) // row_len)
    docs = np.repeat(np.arange(len(lens)), counts)
    nth = np.arange(len(docs)) - np.repeat(np.cumsum(counts) - counts, counts)
    starts = begins[docs] + np.where(nth > 0, firsts[docs] + (nth - 1) * row_len, 0)
    stops = np.minimum(begins[docs] + firsts[docs] + nth * row_len, ends[docs])
    return _PieceTable(starts, stops, stops == ends[docs])


class _Stream:
    """The pieces of one shard, epoch after epoch, each epoch in an order drawn from the seed."""

    def __init__(self, kind: str, shard: Shard, row_len: int, seed: int) -> None:
        self.kind, self.shard, self.row_len, self.seed = kind, shard, row_len, seed
        self.num_tokens = 0
        self.seek(epoch=0, position=0)

    def seek(self, *, epoch: int, position: int) -> None:
        rng = np.random.default_rng([self.seed, zlib.crc32(self.kind.encode()), epoch])
        table = cut_pieces(self.shard.offsets, self.row_len, rng)
        order = rng.permutation(len(table.starts))
        starts, stops, is_ends = table
        self.table = _PieceTable(starts[order], stops[order], is_ends[order])
        self.epoch, self.position = epoch, position

    def draw(self) -> Piece:
        if self.position == len(self.table.starts):
            self.seek(epoch=self.epoch + 1, position=0)
        i = self.position
        start, stop = int(self.table.starts[i]), int(self.table.stops[i])
        self.position += 1
        self.num_tokens += stop - start
        return Piece(self.kind, start, stop, bool(self.table.is_ends[i]))


class _Pool:
    """Pieces that wait for a row: the oldest goes first, or else the longest that fits."""

    def __init__(self) -> None:
        self.by_age: dict[int, Piece] = {}
        self.by_len: list[tuple[int, int]] = []
        self.next_age = 0

    def add(self, piece: Piece) -> None:
        self.by_age[self.next_age] = piece
        bisect.insort(self.by_len, (piece.stop - piece.start, self.next_age))
        self.next_age += 1

    def take(self, room: int) -> Piece | None:
        """Removes and returns a piece of at most `room` tokens, or None."""
        age, piece = next(iter(self.by_age.items()))
        if piece.stop - piece.start <= room:
            position = bisect.bisect_left(self.by_len, (piece.stop - piece.start, age))
        else:
            position = bisect.bisect_left(self.by_len, (room + 1, -1)) - 1
            if position < 0:
                return None
        _, age = self.by_len.pop(position)
        return self.by_age.pop(age)


class BatchWriter:
    """An empty batch that pieces are written into, row by row from the left."""

    def __init__(
        self,
        shards: Mapping[str, Shard],
        batch_rows: int,
        row_len: int,
        pad_id: int,
    ) -> None:
        shape = (batch_rows, row_len)
        self._shards = shards
        self._inputs_BL = np.full(shape, pad_id, dtype=np.int64)
        self._targets_BL = np.full(shape, IGNORED, dtype=np.int64)
        self._segments_BL = np.full(shape, PADDING, dtype=np.int32)
        self._num_pieces = [0] * batch_rows

    def write(self, row: int, fill: int, piece: Piece) -> None:
        shard = self._shards[piece.kind]
        num = piece.stop - piece.start
        num_targets = num - piece.is_end
        self._inputs_BL[row, fill : fill + num] = shard.tokens[piece.start : piece.stop]
        targets = self._targets_BL[row, fill : fill + num_targets]
        targets[:] = shard.tokens[piece.start + 1 : piece.start + 1 + num_targets]
        self._segments_BL[row, fill : fill + num] = self._num_pieces[row]
        self._num_pieces[row] += 1

    def batch(self) -> Batch:
        return Batch(self._inputs_BL, self._targets_BL, self._segments_BL)


class PackedLoader:
    """An endless iterator of `Batch`es; the same arguments give the same batches.

    Mixture weights are shares of tokens. A document longer than a row is cut; every piece starts
    as a sequence of its own.

    Raises:
        ConfigError: no shard, an empty shard, or a weight that is negative or for no shard.
    """

    def __init__(
        self,
        shards: Mapping[str, Shard],
        weights: Mapping[str, float],
        *,
        batch_rows: int,
        row_len: int,
        pad_id: int,
        seed: int = 0,
    ) -> None:
        _check_mixture(shards, weights)
        self.batch_rows, self.row_len, self.pad_id = batch_rows, row_len, pad_id
        self.seed = seed
        total = sum(weights.values())
        self._weights = {kind: weight / total for kind, weight in weights.items() if weight > 0}
        self._shards = {kind: shards[kind] for kind in self._weights}
        self._streams = {
            kind: _Stream(kind, shard, row_len, seed) for kind, shard in self._shards.items()
        }
        self._pool = _Pool()

    def __iter__(self) -> Iterator[Batch]:
        return self

    def __next__(self) -> Batch:
        writer = BatchWriter(self._shards, self.batch_rows, self.row_len, self.pad_id)
        for row in range(self.batch_rows):
            fill = 0
            while fill < self.row_len:
                self._refill()
                piece = self._pool.take(self.row_len - fill)
                if piece is None:
                    break
                writer.write(row, fill, piece)
                fill += piece.stop - piece.start
        return writer.batch()

    def _refill(self) -> None:
        while len(self._pool.by_len) < _POOL_PIECES:
            total = sum(stream.num_tokens for stream in self._streams.values())
            kind = max(
                self._weights,
                key=lambda name: self._weights[name] * total - self._streams[name].num_tokens,
            )
            self._pool.add(self._streams[kind].draw())

    def epochs(self, state: Cursor) -> dict[str, float]:
        """How often each shard's tokens had been drawn at the cursor `state`."""
        return {
            kind: num_tokens / len(self._shards[kind].tokens)
            for kind, (_, _, num_tokens) in state["streams"].items()
        }

    def state_dict(self) -> Cursor:
        """The cursor: what comes next depends on it and the arguments alone."""
        return {
            "streams": {
                kind: (stream.epoch, stream.position, stream.num_tokens)
                for kind, stream in self._streams.items()
            },
            "pool": [(age, *piece) for age, piece in self._pool.by_age.items()],
            "next_age": self._pool.next_age,
        }

    def load_state_dict(self, state: Cursor) -> None:
        """Raises ConfigError if the cursor belongs to other shards."""
        if set(state["streams"]) != set(self._streams):
            raise ConfigError(
                f"the cursor is for the shards {sorted(state['streams'])}, "
                f"not {sorted(self._streams)}"
            )
        for kind, (epoch, position, num_tokens) in state["streams"].items():
            self._streams[kind].seek(epoch=epoch, position=position)
            self._streams[kind].num_tokens = num_tokens
        self._pool = _Pool()
        for age, kind, start, stop, is_end in state["pool"]:
            self._pool.next_age = age
            self._pool.add(Piece(kind, start, stop, is_end))
        self._pool.next_age = state["next_age"]


def _check_mixture(shards: Mapping[str, Shard], weights: Mapping[str, float]) -> None:
    for kind, weight in weights.items():
        if kind not in shards:
            raise ConfigError(f"mixture weight for {kind!r}, but the shards are {sorted(shards)}")
        if weight < 0:
            raise ConfigError(f"the mixture weight of {kind!r} is negative: {weight}")
        if weight > 0 and len(shards[kind].tokens) == 0:
            raise ConfigError(f"the shard {kind!r} is empty")
    if not any(weight > 0 for weight in weights.values()):
        raise ConfigError("every mixture weight is zero")
