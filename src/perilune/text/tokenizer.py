"""What a tokenizer is: text to ids and ids to bytes, with control tokens kept apart from text."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping
from typing import NamedTuple, Protocol

from perilune.text.errors import TextError


class Segment(NamedTuple):
    """A piece of a prompt. Only markup may become control tokens."""

    text: str
    markup: bool
    trained: bool = False
    """True where a model learns to write this piece (the loss mask of training)."""


class Tokenizer(Protocol):
    """Text to ids and back. Immutable; safe to share between threads."""

    @property
    def vocab_size(self) -> int:
        """One more than the highest id."""
        ...

    @property
    def special_ids(self) -> Mapping[str, int]:
        """Named control tokens: name to id."""
        ...

    @property
    def control_ids(self) -> frozenset[int]:
        """Every id that is never text: the named control tokens and the reserved ids."""
        ...

    @property
    def eos_ids(self) -> frozenset[int]:
        """Tokens that end a generation."""
        ...

    def encode(self, text: str, *, allow_special: bool = False) -> list[int]:
        """Ids of `text`. Names of control tokens are ordinary text unless `allow_special`.

        Raises:
            TextError: `text` holds a lone surrogate.
        """
        ...

    def encode_segments(self, segments: Iterable[tuple[str, bool] | Segment]) -> list[int]:
        """Ids of (text, is-markup) pieces, each encoded by itself and then joined."""
        ...

    def token_bytes(self, token_id: int) -> bytes:
        """Bytes of one token; of a control token, its name in UTF-8.

        Raises:
            TextError: no such token.
        """
        ...

    def decode_bytes(self, ids: Iterable[int]) -> bytes:
        """Bytes of all tokens, joined."""
        ...

    def decode(self, ids: Iterable[int]) -> str:
        """As `decode_bytes`, with bytes that are not UTF-8 replaced by U+FFFD."""
        ...


class SegmentCodec(ABC):
    """The methods that every tokenizer derives from `encode` and `token_bytes`."""

    special_ids: Mapping[str, int]

    @abstractmethod
    def encode(self, text: str, *, allow_special: bool = False) -> list[int]: ...

    @abstractmethod
    def token_bytes(self, token_id: int) -> bytes: ...

    def encode_segments(self, segments: Iterable[tuple[str, bool] | Segment]) -> list[int]:
        ids: list[int] = []
        for segment in segments:
            text, markup = segment[0], segment[1]
            special_id = self.special_ids.get(text) if markup else None
            if special_id is not None:
                ids.append(special_id)
            else:
                ids.extend(self.encode(text, allow_special=markup))
        return ids

    def decode_bytes(self, ids: Iterable[int]) -> bytes:
        return b"".join(map(self.token_bytes, ids))

    def decode(self, ids: Iterable[int]) -> str:
        return self.decode_bytes(ids).decode("utf-8", errors="replace")


def check_encodable(text: str) -> None:
    """Raises TextError if `text` holds a lone surrogate, which no UTF-8 sequence encodes."""
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as error:
        raise TextError(
            f"text holds a lone surrogate (U+{ord(text[error.start]):04X}) at character "
            f"{error.start}; it is not valid Unicode"
        ) from error
