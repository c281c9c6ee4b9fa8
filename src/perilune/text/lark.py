"""Grammars in llguidance's dialect of Lark, put together line by line.

What comes from a request is quoted or escaped here, so that it can never be syntax.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from typing import Any

from perilune.text.tokenizer import check_encodable

ANY_TEXT = "/(?s:.*)/"
"""All text that is valid UTF-8, the empty one too."""

_JSON_OPTIONS = {
    # At most one space, or a line break with its indentation: a model that has lost its way cannot
    # go on writing blanks for ever.
    "whitespace_pattern": r" |\n[ \t]{0,64}",
    # No \\u: an escaped letter would make two spellings of one key.
    "json_allowed_escapes": 'nrbtf\\"',
}


class LarkText:
    """The rules of a grammar, in order; the first is to be `start`."""

    def __init__(self) -> None:
        self._lines: list[str] = []

    def rule(self, name: str, body: str, *, at: str = "") -> None:
        """Adds a rule or, with an uppercase name, a terminal. `at`: the field it comes from."""
        if at:
            self._lines.append(f"// {' '.join(at.split())}")
        self._lines.append(f"{name}: {body}")

    def __str__(self) -> str:
        return "\n".join(self._lines) + "\n"


def token(token_id: int) -> str:
    """Exactly this token; for control tokens, which are no text."""
    return f"<[{token_id}]>"


def literal(text: str) -> str:
    """Exactly this text. Raises TextError if it holds a lone surrogate."""
    check_encodable(text)
    return json.dumps(text, ensure_ascii=False).replace("\x7f", r"\u007f")


def regex(pattern: str) -> str:
    """A whole text by a regular expression. Raises TextError if it holds a lone surrogate."""
    check_encodable(pattern)
    if not pattern:
        return '""'  # two slashes would begin a comment
    return f"/{_escaped(pattern)}/"


def json_value(schema: Mapping[str, Any]) -> str:
    """JSON text by a normalised schema."""
    return f"%json {json.dumps({**schema, 'x-guidance': _JSON_OPTIONS}, ensure_ascii=False)}"


def choice(options: Iterable[str]) -> str:
    return " | ".join(options)


def _escaped(pattern: str) -> str:
    pieces: list[str] = []
    chars = iter(pattern)
    for char in chars:
        if char == "\\":
            pieces.append(char + next(chars, ""))
        else:
            pieces.append({"/": r"\/", "\n": r"\n", "\r": r"\r"}.get(char, char))
    return "".join(pieces)
