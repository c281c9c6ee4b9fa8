"""Values of JSON Schema keywords that hold no schema: checked, and cut to what a grammar takes.

A reader gets the value and the field that it stands in, and raises TextError for a wrong value.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from decimal import Decimal
from typing import NoReturn

from perilune.text.errors import TextError

MAX_DEPTH = 32
"""Of schemas in schemas, and of a value in `enum` or `const`."""
MAX_NAMES = 256
"""Properties of an object, branches of a choice."""
MAX_LEAST = 10_000
"""Of minLength, minItems and minProperties."""
MAX_PATTERN_CHARS = 2_048

TYPES = ("string", "number", "integer", "boolean", "null", "object", "array")
FORMATS = frozenset(
    ("date-time", "time", "date", "duration", "email", "hostname", "ipv4", "ipv6", "uuid", "uri")
)
"""The formats that are enforced. Others only describe, which JSON Schema allows for all."""

_MAX_FIELD_CHARS = 200


def refuse(at: str, what: str) -> NoReturn:
    field = at if len(at) <= _MAX_FIELD_CHARS else f"{at[:_MAX_FIELD_CHARS]}…"
    raise TextError(f"{field}: {what}", param=field)


def check_number_of(what: str, number: int, at: str) -> None:
    if number > MAX_NAMES:
        refuse(at, f"{number} {what}; at most {MAX_NAMES} are allowed")


def _types(value: object, at: str) -> object:
    names = value if isinstance(value, list) else [value]
    if not names or any(name not in TYPES for name in names):
        refuse(at, f"{json.dumps(value)[:80]} is no type")
    return value


def _values(value: object, at: str) -> object:
    if not isinstance(value, list) or not value:
        refuse(at, "a list of values is wanted")
    return [_value(item, at) for item in value]


def _value(value: object, at: str) -> object:
    level = [value]
    for _ in range(MAX_DEPTH):
        level = [inner for item in level for inner in _inner(item)]
        if not level:
            return value
    refuse(at, f"values may be nested {MAX_DEPTH} deep")


def _inner(value: object) -> list[object]:
    if isinstance(value, dict):
        return [*value.values()]
    return value if isinstance(value, list) else []


def pattern(value: object, at: str) -> str:
    if not isinstance(value, str):
        refuse(at, "a regular expression is wanted")
    if len(value) > MAX_PATTERN_CHARS:
        refuse(at, f"{len(value)} characters; at most {MAX_PATTERN_CHARS} are allowed")
    return value


def _format(value: object, at: str) -> str | None:
    return value if isinstance(value, str) and value in FORMATS else None


def _required(value: object, at: str) -> list[str]:
    if not isinstance(value, list) or not all(isinstance(name, str) for name in value):
        refuse(at, "a list of names is wanted")
    check_number_of("names", len(value), at)
    return list(dict.fromkeys(value))


def _least(value: object, at: str) -> int:
    count = _count(value, at)
    if count > MAX_LEAST:
        refuse(at, f"at most {MAX_LEAST} can be asked for")
    return count


def _most(value: object, at: str) -> int:
    return min(_count(value, at), 2**31 - 1)


def _count(value: object, at: str) -> int:
    if isinstance(value, float) and value.is_integer():
        value = int(value)
    if isinstance(value, bool) or not isinstance(value, int) or value < 0:
        refuse(at, "a whole number of 0 or more is wanted")
    return value


def number(value: object, at: str) -> int | float:
    if isinstance(value, bool) or not isinstance(value, int | float):
        refuse(at, "a number is wanted")
    if not abs(value) <= 1e18:
        refuse(at, "numbers up to 1e18 can be held to")
    return value


def digits_of(value: float) -> int:
    """The digits of a number without its sign, its decimal point and its zeros at the end."""
    return int("".join(map(str, Decimal(str(value)).normalize().as_tuple().digits)))


READERS: dict[str, Callable[[object, str], object]] = {
    "type": _types,
    "enum": _values,
    "const": _value,
    "required": _required,
    "minProperties": _least,
    "maxProperties": _most,
    "minItems": _least,
    "maxItems": _most,
    "format": _format,
    "minLength": _least,
    "maxLength": _most,
    "minimum": number,
    "maximum": number,
    "exclusiveMinimum": number,
    "exclusiveMaximum": number,
}
"""A reader's None leaves the keyword out."""
