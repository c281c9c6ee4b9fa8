"""Tool calls of a past message as XTML: one element an argument."""

from __future__ import annotations

from collections.abc import Sequence

from perilune.core.types import ToolCall
from perilune.text import argument_json
from perilune.text.tokenizer import Segment
from perilune.text.xtml_markup import close_tag, open_tag, text_segment


def tools_channel(calls: Sequence[ToolCall], *, trained: bool) -> list[Segment]:
    """The tools element; nothing where there are no calls. Calls are numbered from 1."""
    if not calls:
        return []
    segments = open_tag("tools", trained=trained)
    for index, call in enumerate(calls, start=1):
        attributes = (("tool", call.name), ("index", str(index)))
        segments += open_tag("call", attributes, trained=trained)
        segments += _arguments(call.arguments, trained=trained)
        segments += close_tag("call", trained=trained)
    return segments + close_tag("tools", trained=trained)


def _arguments(arguments: str, *, trained: bool) -> list[Segment]:
    """Strings stand raw, other values as JSON, in the order in which they came."""
    if not arguments.strip():
        return []
    try:
        bodies = [
            (key, argument_json.type_name(value), _body(value))
            for key, value in argument_json.parse_object(arguments).items()
        ]
        "".join(key + body for key, _, body in bodies).encode()  # fails for a lone surrogate
    except ValueError:
        # Only a history can hold this; a model must not learn to write it.
        fallback = open_tag("json", (("type", "object"),))
        return fallback + text_segment(arguments) + close_tag("json")
    segments: list[Segment] = []
    for key, kind, body in bodies:
        segments += open_tag("argument", (("key", key), ("type", kind)), trained=trained)
        segments += text_segment(body, trained=trained)
        segments += close_tag("argument", trained=trained)
    return segments


def _body(value: object) -> str:
    is_string = argument_json.type_name(value) == "string"
    return str(value) if is_string else argument_json.dump(value)
