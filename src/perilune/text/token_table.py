"""A tokenizer's vocabulary as bytes, for whoever sees ids and no text."""

from __future__ import annotations

from pathlib import Path

from perilune.core.types import TokenTable
from perilune.text.errors import TextError
from perilune.text.load import load_tokenizer
from perilune.text.tokenizer import Tokenizer


def token_table(model_dir: str | Path) -> TokenTable:
    """The table of a checkpoint directory. Raises as `load_tokenizer`."""
    return table_of(load_tokenizer(model_dir))


def table_of(tokenizer: Tokenizer) -> TokenTable:
    return TokenTable(
        tokens=tuple(_bytes(tokenizer, token_id) for token_id in range(tokenizer.vocab_size)),
        control_ids=tokenizer.control_ids,
    )


def _bytes(tokenizer: Tokenizer, token_id: int) -> bytes:
    try:
        return tokenizer.token_bytes(token_id)
    except TextError:  # a hole in the vocabulary
        return b""
