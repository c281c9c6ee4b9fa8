"""K3's pre-tokeniser: the pattern that splits text before BPE, and the cuts made before it.

The pattern needs class intersection (`&&`), which tiktoken's Rust engine has and `re` has not.
"""

from __future__ import annotations

import re
from collections.abc import Iterator

MAX_PIECE_CHARS = 400_000
MAX_RUN_CHARS = 25_000

_UPPER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]"
_LOWER = r"[\p{Ll}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]"
_LEAD = r"[^\r\n\p{L}\p{N}]?"
_CONTRACTION = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)?"

PATTERN = "|".join(
    (
        r"[\p{Han}]+",
        f"{_LEAD}{_UPPER}*{_LOWER}+{_CONTRACTION}",
        f"{_LEAD}{_UPPER}+{_LOWER}*{_CONTRACTION}",
        r"\p{N}{1,3}",
        r" ?[^\s\p{L}\p{N}]+[\r\n]*",
        r"\s*[\r\n]+",
        r"\s+(?!\S)",
        r"\s+",
    )
)

_RUN = re.compile(r"\s+|\S+")
_SPACE = re.compile(r"\s")


def cut(text: str) -> Iterator[str]:
    """Pieces that are encoded one by one; they join to `text`.

    The released tokenizer cuts every 400,000 characters, and inside runs of more than 25,000
    white-space or other characters; a cut can change tokens, so the places matter.
    """
    for start in range(0, len(text), MAX_PIECE_CHARS):
        piece = text[start : start + MAX_PIECE_CHARS]
        if _may_hold_long_run(piece):
            yield from _cut_runs(piece)
        else:
            yield piece


def _may_hold_long_run(piece: str) -> bool:
    """A run longer than the limit covers a whole window of half that length: few to look at."""
    half = MAX_RUN_CHARS // 2
    return any(
        window.isspace() or not _SPACE.search(window)
        for window in (piece[i : i + half] for i in range(0, len(piece) - half + 1, half))
    )


def _cut_runs(piece: str) -> Iterator[str]:
    start = 0
    for run in _RUN.finditer(piece):
        for end in range(run.start() + MAX_RUN_CHARS, run.end(), MAX_RUN_CHARS):
            yield piece[start:end]
            start = end
    yield piece[start:]
