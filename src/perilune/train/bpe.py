"""Trains the byte-level BPE of a small model and writes it in K3's rank-file format."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from pathlib import Path

from tokenizers import Regex, Tokenizer, models, pre_tokenizers, trainers

from perilune.core.errors import ConfigError
from perilune.text.k3_names import tokenizer_config
from perilune.text.pretokenizer import PATTERN
from perilune.text.tiktoken_ranks import save_ranks
from perilune.train.document import KINDS, Document, Kind, plain_text, stable_hash

NANO_RANKS = 5888
"""With the 256 reserved ids: a vocabulary of 6144, a multiple of 128."""
SAMPLE_BYTES: dict[Kind, int] = {
    "chat": 24_000_000,
    "code": 16_000_000,
    "prose": 10_000_000,
    "synthetic": 6_000_000,
}


def sample(documents: Iterable[Document], max_bytes: dict[Kind, int]) -> list[str]:
    """Texts up to `max_bytes` of each kind, chosen by hash so that every source is in it."""
    held = dict.fromkeys(KINDS, 0)
    texts: list[str] = []
    for text, kind in sorted(
        ((plain_text(document), document.kind) for document in documents),
        key=lambda pair: stable_hash("bpe:" + pair[0][:2000]),
    ):
        size = len(text.encode())
        if held[kind] + size <= max_bytes[kind]:
            held[kind] += size
            texts.append(text)
    return texts


def byte_alphabet() -> dict[str, int]:
    """The printable character that stands for each byte in `tokenizers` (GPT-2's table).

    Bytes that print as themselves keep their character; the others are moved up from U+0100.
    """
    shown = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    hidden = [value for value in range(256) if value not in set(shown)]
    table = {chr(value): value for value in shown}
    return table | {chr(256 + i): value for i, value in enumerate(hidden)}


def train_bpe(texts: Iterable[str], num_ranks: int, *, progress: bool = False) -> Tokenizer:
    """A byte-level BPE with K3's pre-tokeniser and exactly `num_ranks` tokens.

    Raises:
        ConfigError: the texts are too small for that many tokens.
    """
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(PATTERN), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    trainer = trainers.BpeTrainer(
        vocab_size=num_ranks,
        initial_alphabet=sorted(byte_alphabet()),
        show_progress=progress,
        special_tokens=[],
    )
    tokenizer.train_from_iterator(_pieces(texts), trainer)
    if tokenizer.get_vocab_size() != num_ranks:
        raise ConfigError(
            f"the sample yields {tokenizer.get_vocab_size()} tokens, {num_ranks} are wanted"
        )
    return tokenizer


def _pieces(texts: Iterable[str]) -> Iterator[str]:
    """The regex engine backtracks over long texts: hand it short ones."""
    for text in texts:
        for start in range(0, len(text), 100_000):
            yield text[start : start + 100_000]


def ranks_of(tokenizer: Tokenizer) -> dict[bytes, int]:
    """Token bytes to rank: the ids are already in merge order."""
    alphabet = byte_alphabet()
    return {
        bytes(alphabet[char] for char in token): rank
        for token, rank in tokenizer.get_vocab().items()
    }


def write_tokenizer(folder: Path, ranks: dict[bytes, int]) -> None:
    """`tiktoken.model` and the `tokenizer_config.json` that names K3's control tokens."""
    folder.mkdir(parents=True, exist_ok=True)
    save_ranks(folder / "tiktoken.model", ranks)
    config = json.dumps(tokenizer_config(len(ranks)), indent=2, ensure_ascii=False)
    (folder / "tokenizer_config.json").write_text(config + "\n", encoding="utf-8")
