"""The corpus: every document of every source once, on one side of the split."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Literal, NamedTuple

from perilune.train.document import Document, plain_text, stable_hash
from perilune.train.sources import FetchedSource

Split = Literal["train", "validation"]
_SPLIT_PARTS = 1000


class SplitDocument(NamedTuple):
    split: Split
    document: Document


def split_of(document: Document, validation_per_mille: int) -> Split:
    """By the hash of `split_key` (or of the text): the same document never changes sides."""
    key = document.split_key if document.split_key is not None else plain_text(document)
    is_held_out = stable_hash("split:" + key) % _SPLIT_PARTS < validation_per_mille
    return "validation" if is_held_out else "train"


def without_duplicates(documents: Iterable[Document]) -> Iterator[Document]:
    """Drops documents whose text was seen before, white space aside."""
    seen: set[int] = set()
    for document in documents:
        key = _content(document)
        if key not in seen:
            seen.add(key)
            yield document


def without_leaks(documents: Iterable[SplitDocument]) -> list[SplitDocument]:
    """Drops validation documents whose text is also one to train on, white space aside."""
    held = list(documents)
    trained = {_content(d.document) for d in held if d.split == "train"}
    return [d for d in held if d.split == "train" or _content(d.document) not in trained]


def _content(document: Document) -> int:
    return stable_hash(" ".join(plain_text(document).split()))


def capped(documents: Iterable[Document], max_bytes: int) -> list[Document]:
    """At most `max_bytes` of text: documents drop out in the order of their hashes."""
    held = [(document, len(plain_text(document).encode())) for document in documents]
    order = sorted(range(len(held)), key=lambda i: stable_hash("cap:" + plain_text(held[i][0])))
    total, kept = 0, set()
    for i in order:
        if total + held[i][1] <= max_bytes:
            total += held[i][1]
            kept.add(i)
    return [document for i, (document, _) in enumerate(held) if i in kept]


def read_source(fetched: FetchedSource) -> list[Document]:
    """The documents of one source, capped and without repeats within it."""
    documents = without_duplicates(fetched.source.read(Path(fetched.path)))
    return capped(documents, fetched.source.max_bytes)
