"""Prompts for blocks: token ids, or text for servers that take no ids.

The tokens of a block depend on the seed and its key alone, so that a prefix that is shared in the
trace is shared on the wire, whatever was sent before.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from random import Random
from typing import Protocol

from perilune.gateway.load.errors import WorkloadError
from perilune.gateway.load.workload import Block

FIRST_ID, END_ID = 300, 4000
"""Ids that are ordinary text in the vocabularies in use: bytes and control tokens stand below, or
far above."""

_WORD_LIST = """
time year people way day man thing woman life child world school state family student group country
problem hand part place case week company system program question work night point home water room
mother area money story fact month lot right study book eye job word business issue side kind head
house service friend father power hour game line end member law car city
"""
WORDS = tuple(_WORD_LIST.split())
"""Short and common: single tokens, with the space before them, in large vocabularies."""

_CACHED_BLOCKS = 1024


class PromptMaker(Protocol):
    def json(self, blocks: Sequence[Block]) -> bytes:
        """The prompt as JSON: a string or a list of ids."""
        ...


class IdPrompts:
    """Ids from `first_id` up to, not including, `end_id`."""

    def __init__(self, seed: str, first_id: int = FIRST_ID, end_id: int = END_ID) -> None:
        if not 0 <= first_id < end_id:
            raise WorkloadError(f"there is no token id from {first_id} up to {end_id}")
        self._seed = seed
        self._range = range(first_id, end_id)
        self._text = lru_cache(_CACHED_BLOCKS)(self._fresh_text)

    def ids(self, block: Block) -> list[int]:
        """A shorter block of the same key gets the first of these."""
        return Random(f"{self._seed} {block.key}").choices(self._range, k=block.num_tokens)

    def json(self, blocks: Sequence[Block]) -> bytes:
        return b"[" + b",".join(map(self._text, blocks)) + b"]"

    def _fresh_text(self, block: Block) -> bytes:
        return ",".join(map(str, self.ids(block))).encode()


class TextPrompts:
    """Words, one for each token that is wanted; the server's tokenizer may count otherwise."""

    def __init__(self, seed: str) -> None:
        self._seed = seed
        self._text = lru_cache(_CACHED_BLOCKS)(self._fresh_text)

    def json(self, blocks: Sequence[Block]) -> bytes:
        return b'"' + b"".join(map(self._text, blocks)) + b'"'

    def _fresh_text(self, block: Block) -> bytes:
        words = Random(f"{self._seed} {block.key}").choices(WORDS, k=block.num_tokens)
        return "".join(f" {word}" for word in words).encode()
