"""Regular expressions of JSON Schema, for a text that is matched as a whole.

A schema's `pattern` may match anywhere in a text. Digits and words are ASCII here, as in
ECMAScript: what matches then matches elsewhere, too.
"""

from __future__ import annotations

from collections.abc import Iterator

from perilune.text.schema_keywords import refuse

_ANY = "(?s:.*)"
_CLASSES = {"d": "0-9", "w": "0-9A-Za-z_"}


def whole_text(pattern: str, at: str) -> str:
    """The expression of all texts in which `pattern` occurs.

    Raises:
        TextError: ^ or $ inside of it; `at` is its field.
    """
    return "|".join(_branch(pieces, at) for pieces in _branches(_pieces(pattern)))


def plain_classes(pattern: str) -> str:
    """The same expression, with classes that mean the same in every dialect."""
    return "".join(_pieces(pattern))


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


def _pieces(pattern: str) -> Iterator[str]:
    """Single characters, but escapes and the classes in brackets whole."""
    chars = iter(pattern)
    for char in chars:
        if char == "\\":
            yield _escape(next(chars, ""))
        elif char == "[":
            yield _brackets(chars)
        else:
            yield char


def _escape(letter: str) -> str:
    if letter.lower() in _CLASSES:
        negated = "^" if letter.isupper() else ""
        return f"[{negated}{_CLASSES[letter.lower()]}]"
    return f"\\{letter}"


def _brackets(chars: Iterator[str]) -> str:
    body: list[str] = []
    for char in chars:
        if char == "\\":
            letter = next(chars, "")
            body.append(_CLASSES.get(letter, f"\\{letter}"))
        elif char == "]" and body not in ([], ["^"]):
            return f"[{''.join(body)}]"
        elif char == "[":
            body.append(r"\[")  # a bracket in brackets is a set operation in some dialects
        else:
            body.append(char)
    return f"[{''.join(body)}"
