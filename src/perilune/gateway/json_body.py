"""JSON bodies into typed values, with errors that name the field or the position."""

from __future__ import annotations

import json
import re
from typing import Any, NoReturn, TypeVar

import msgspec

from perilune.gateway.errors import BodyError

T = TypeVar("T")

MAX_MESSAGE_CHARS = 300
"""A wrong value is quoted in the message; the whole of a long one would help nobody."""

SECOND_LOOK_BYTES = 2**18
"""The second look holds Python's lock: 0.7 s for the worst 4 MiB, 40 ms at this length."""

_AT_PATH = re.compile(r"^(?P<what>.*?)(?: - at `\$\.?(?P<path>.*)`)?$", re.DOTALL)
_MISSING_FIELD = re.compile(r"^Object missing required field `(?P<name>.*)`$")
_SURROGATE = re.compile("[\ud800-\udfff]")


def decode(body: bytes, decoder: msgspec.json.Decoder[T]) -> T:
    """Decodes `body`.

    Raises:
        BodyError: with the field as `param` if one is wrong, else with the place in the text.
    """
    try:
        return decoder.decode(body)
    except msgspec.ValidationError as error:
        raise field_error(error) from None
    except msgspec.DecodeError as error:
        _raise_syntax_error(body, str(error))
    except RecursionError:
        raise BodyError("the JSON body is nested too deeply") from None


def field_error(error: msgspec.ValidationError, at: str = "") -> BodyError:
    """The codec's message with the path turned into `param`; `at` goes before the path."""
    match = _AT_PATH.match(str(error))
    what, path = (match["what"], match["path"] or "") if match else (str(error), "")
    missing = _MISSING_FIELD.match(what)
    if missing:
        path, what = _join(path, missing["name"]), "required field is missing"
    param = _join(at, path)
    what = what[:1].lower() + what[1:MAX_MESSAGE_CHARS]
    return BodyError(f"{param}: {what}" if param else f"the JSON body: {what}", param=param or None)


def _join(path: str, rest: str) -> str:
    dot = "." if path and rest and not rest.startswith("[") else ""
    return f"{path}{dot}{rest}"


def _raise_syntax_error(body: bytes, reason: str) -> NoReturn:
    """A second look with the standard library, which can tell where the text breaks."""
    if not body.strip():
        raise BodyError("the body is empty; a JSON object is expected")
    if len(body) > SECOND_LOOK_BYTES:
        raise BodyError(f"the body is not JSON, or holds a lone surrogate: {reason}")
    try:
        path = _find_surrogate(json.loads(body.decode("utf-8")))
    except UnicodeDecodeError as error:
        raise BodyError(f"the body is not UTF-8: {error.reason} at byte {error.start}") from None
    except json.JSONDecodeError as error:
        raise BodyError(
            f"the body is not JSON: {error.msg} at line {error.lineno}, column {error.colno} "
            f"(character {error.pos})"
        ) from None
    except (RecursionError, ValueError):
        path = None
    if path is None:
        raise BodyError(f"the body is not JSON: {reason}")
    raise BodyError(f"{path} holds a lone surrogate, which is not valid Unicode", param=path)


def _find_surrogate(value: Any, path: str = "") -> str | None:
    """The path of the first string that holds a lone surrogate."""
    match value:
        case str():
            return (path or "the body") if _SURROGATE.search(value) else None
        case dict():
            if any(map(_SURROGATE.search, value)):
                return f"a key in {path or 'the body'}"
            items = [(_join(path, key), item) for key, item in value.items()]
        case list():
            items = [(f"{path}[{index}]", item) for index, item in enumerate(value)]
        case _:
            return None
    return next((found for at, item in items if (found := _find_surrogate(item, at))), None)
