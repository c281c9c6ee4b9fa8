"""Regular expressions of requests, in the dialect of the grammar library.

Dialects differ in what a class holds beyond ASCII. What is matched here is matched in all of them:
a class is narrow where it stands for what is allowed, and wide where for what is not. A schema's
`pattern` may match anywhere in a text, which the library cannot say of a text as a whole.
"""

from __future__ import annotations

from collections.abc import Iterator

from perilune.text.schema_keywords import refuse

_ANY = "(?s:.*)"
_DOT = r"[^\n\r\x{2028}\x{2029}]"
"""In ECMAScript, whose dialect is that of schemas, a dot is no line separator either."""
_NARROW = {"d": "0-9", "w": "0-9A-Za-z_", "s": r" \t\n\r\x0b\x0c"}
_WIDE = {"d": r"\p{Nd}", "w": r"\p{L}\p{M}\p{N}\p{Pc}", "s": r"\p{Z}\t-\r\x1c-\x1f\x{85}\x{feff}"}


def common_pattern(pattern: str) -> str:
    """An expression that matches only what `pattern` matches in every dialect."""
    return "".join(_pieces(pattern, dot="."))


def schema_pattern(pattern: str) -> str:
    """As `common_pattern`, for a `pattern` of JSON Schema."""
    return "".join(_pieces(pattern, dot=_DOT))


def whole_text(pattern: str, at: str) -> str:
    """The expression of all texts in which the `schema_pattern` occurs.

    Raises:
        TextError: ^ or $ inside of it; `at` is its field.
    """
    return "|".join(_branch(pieces, at) for pieces in _branches(_pieces(pattern, dot=_DOT)))


def _branch(pieces: list[str], at: str) -> str:
    begins, ends = pieces[:1] == ["^"], pieces[-1:] == ["$"]
    inner = pieces[begins : len(pieces) - ends]
    if "^" in inner or "$" in inner:
        refuse(at, "^ and $ are read at the ends of an alternative only")
    return f"{'' if begins else _ANY}(?:{''.join(inner)}){'' if ends else _ANY}"


def _branches(pieces: Iterator[str]) -> Iterator[list[str]]:
    """The alternatives outside of all brackets."""
    depth, branch = 0, []
    for piece in pieces:
        depth += (piece == "(") - (piece == ")")
        if piece == "|" and depth == 0:
            yield branch
            branch = []
        else:
            branch.append(piece)
    yield branch


def _pieces(pattern: str, *, dot: str) -> Iterator[str]:
    """Single characters, but escapes and the classes in brackets whole."""
    chars = iter(pattern)
    for char in chars:
        if char == "\\":
            yield _escape(next(chars, ""))
        elif char == "[":
            yield _brackets(chars)
        else:
            yield dot if char == "." else char


def _escape(letter: str) -> str:
    if letter in _NARROW:
        return f"[{_NARROW[letter]}]"
    if letter.lower() in _WIDE:
        return f"[^{_WIDE[letter.lower()]}]"
    return f"\\{letter}"


def _brackets(chars: Iterator[str]) -> str:
    body: list[str] = []
    for char in chars:
        if char == "\\":
            letter = next(chars, "")
            classes = _WIDE if body[:1] == ["^"] else _NARROW
            body.append(classes.get(letter, f"\\{letter}"))
        elif char == "]" and body not in ([], ["^"]):
            return f"[{''.join(body)}]"
        elif char == "[":
            body.append(r"\[")  # a bracket in brackets is a set operation in some dialects
        else:
            body.append(char)
    return f"[{''.join(body)}"
