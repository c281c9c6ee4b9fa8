"""What the first rank tells the others, in frames of `wire`: everything that touches the tensors.

No token ids: they go from device to device.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import msgspec
import numpy as np

from perilune.model.step import PAGE, Cut, Decoding, Pages, Prefilling


class Join(msgspec.Struct, tag=True, frozen=True):
    """The first frame: which part of which model."""

    version: str
    rank: int
    size: int
    store: str
    """The file at which all meet."""
    model_dir: str
    device: str
    dtype: str
    threads: int | None


class NewPools(msgspec.Struct, tag=True, frozen=True):
    slots: int
    pages: int


class CopySlots(msgspec.Struct, tag=True, frozen=True):
    pairs: list[tuple[int, int]]


class CopyPages(msgspec.Struct, tag=True, frozen=True):
    pairs: list[tuple[int, int]]


class _Decoding(msgspec.Struct, array_like=True, frozen=True):
    slot: int
    pages: bytes
    num_tokens: int


class _Prefilling(msgspec.Struct, array_like=True, frozen=True):
    slot: int
    pages: bytes
    num_cached: int
    num_new: int
    cuts: list[tuple[int, int]]
    num_logits: int


class Feed(msgspec.Struct, tag=True, frozen=True):
    """A step. The tokens follow from the first rank's device."""

    decoding: list[_Decoding]
    prefilling: list[_Prefilling]
    num_each: int
    """Tokens of each that decodes."""
    verify: bool
    """They are drafts."""

    @staticmethod
    def of(
        decoding: Iterable[Decoding],
        prefilling: Iterable[Prefilling],
        *,
        num_each: int,
        verify: bool,
    ) -> Feed:
        return Feed(
            [_Decoding(s.slot, _packed(s.pages, s.num_tokens), s.num_tokens) for s in decoding],
            [
                _Prefilling(
                    s.slot,
                    _packed(s.pages, s.num_cached + s.num_new),
                    s.num_cached,
                    s.num_new,
                    [(cut.after, cut.slot) for cut in s.cuts],
                    s.num_logits,
                )
                for s in prefilling
            ],
            num_each,
            verify,
        )

    def sequences(self) -> tuple[list[Decoding], list[Prefilling]]:
        """What `Pools.step` takes."""
        decoding = [Decoding(s.slot, _unpacked(s.pages), s.num_tokens) for s in self.decoding]
        prefilling = [
            Prefilling(
                s.slot,
                _unpacked(s.pages),
                s.num_cached,
                s.num_new,
                [Cut(*cut) for cut in s.cuts],
                s.num_logits,
            )
            for s in self.prefilling
        ]
        return decoding, prefilling


class Accept(msgspec.Struct, tag=True, frozen=True):
    """Of the drafts verified last. How many count follows from the first rank's device."""

    num_sequences: int


class NewGraphs(msgspec.Struct, tag=True, frozen=True):
    """Of steps that only decode, with room for so many."""

    rows: int
    pages: int


class Capture(msgspec.Struct, tag=True, frozen=True):
    rows: int


class Replay(msgspec.Struct, tag=True, frozen=True):
    """A step in a graph. Its tokens are among the integers, or sampled by all ranks alike."""

    rows: int
    width: int
    integers: bytes


class NewDraftGraphs(msgspec.Struct, tag=True, frozen=True):
    """Of steps that verify drafts, with as much room as those of steps that only decode."""


class CaptureDrafts(msgspec.Struct, tag=True, frozen=True):
    sequences: int
    each: int
    """Tokens of a sequence."""


class ReplayDrafts(msgspec.Struct, tag=True, frozen=True):
    """A step in a graph, with its tokens."""

    sequences: int
    each: int
    width: int
    integers: bytes


class AcceptDrafts(msgspec.Struct, tag=True, frozen=True):
    """Of the step before."""

    sequences: int
    each: int
    num_kept: list[int]


OfGraphs = (
    NewGraphs | Capture | Replay | NewDraftGraphs | CaptureDrafts | ReplayDrafts | AcceptDrafts
)
ToRank = Join | NewPools | CopySlots | CopyPages | Feed | Accept | OfGraphs

decode_to_rank = msgspec.msgpack.Decoder(ToRank).decode


def _packed(pages: Pages, num_tokens: int) -> bytes:
    """Those that the tokens lie on: others may be reserved behind them."""
    return np.asarray(pages[: -(-num_tokens // PAGE)], "<i4").tobytes()


def _unpacked(pages: bytes) -> Sequence[int] | np.ndarray:
    return np.frombuffer(pages, "<i4")
