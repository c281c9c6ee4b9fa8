"""Arguments of a tool call as JSON that keeps every number as it was written.

K3 writes argument values with a space after each comma and colon and in their own key order.
Python's `json` would also rewrite numbers (1e20, 1.50, 30 digits); a model must see again what
it wrote, so numbers stay text here.
"""

from __future__ import annotations

import json
import re
from typing import NoReturn

_SURROGATE = re.compile("[\ud800-\udfff]")


class Number(str):
    """A JSON number, verbatim."""

    __slots__ = ()


def _refuse_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is not JSON")


_DECODER = json.JSONDecoder(parse_int=Number, parse_float=Number, parse_constant=_refuse_constant)


def parse(text: str) -> object:
    """The value of `text`, numbers as `Number`.

    Raises:
        ValueError: not JSON, or nested too deeply.
    """
    try:
        return _DECODER.decode(text)
    except RecursionError as error:
        raise ValueError("nested too deeply") from error


def parse_object(text: str) -> dict[str, object]:
    """As `parse`, for an object.

    Raises:
        ValueError: not JSON, nested too deeply, or not an object.
    """
    value = parse(text)
    if not isinstance(value, dict):
        raise ValueError(f"an object is wanted, not {type_name(value)}")
    return value


def dump(value: object) -> str:
    """JSON text of a parsed value: `, ` and `: `, non-ASCII kept, keys in their order.

    Raises:
        ValueError: nested too deeply.
    """
    try:
        return _dump(value)
    except RecursionError as error:
        raise ValueError("nested too deeply") from error


def _dump(value: object) -> str:
    if isinstance(value, Number):
        return str(value)
    if isinstance(value, dict):
        pairs = (f"{quote(str(key))}: {_dump(item)}" for key, item in value.items())
        return "{" + ", ".join(pairs) + "}"
    if isinstance(value, list):
        return "[" + ", ".join(map(_dump, value)) + "]"
    if isinstance(value, str):
        return quote(value)
    return json.dumps(value)


def quote(text: str) -> str:
    """`text` as a JSON string: non-ASCII kept, but a lone surrogate, which only JSON can say."""
    return json.dumps(text, ensure_ascii=_SURROGATE.search(text) is not None)


def type_name(value: object) -> str:
    """K3's name for the type of a parsed value."""
    if isinstance(value, Number):
        return "number"
    if isinstance(value, bool):
        return "boolean"
    names: dict[type, str] = {str: "string", dict: "object", list: "array", type(None): "null"}
    return names[type(value)]
