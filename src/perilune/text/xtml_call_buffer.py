"""A tool call while it comes in: kept back until it is whole, then one JSON object."""

from __future__ import annotations

from perilune.text import argument_json
from perilune.text.k3_names import OPEN, SEP
from perilune.text.xtml_tag import Tag

_TYPES = frozenset({"string", "number", "boolean", "null", "object", "array"})


class CallBuffer:
    """The arguments so far. The first fault stands: a call with a fault never comes out."""

    def __init__(self, tag: Tag) -> None:
        self.name = (tag.attributes or {}).get("tool", "")
        self.fault = None if self.name else "call_without_tool"
        self.raw = bytearray(f"{OPEN}{tag.text}{SEP}".encode())
        """All that was read of the call, control tokens by name."""
        self._values: dict[str, str] = {}
        self._key = ""
        self._type = ""
        self._body = bytearray()

    def fail(self, fault: str) -> None:
        self.fault = self.fault or fault

    def open_argument(self, tag: Tag) -> None:
        attributes = tag.attributes or {}
        self._key, self._type = attributes.get("key", ""), attributes.get("type", "")
        self._body.clear()
        if "type" not in attributes or self._type not in _TYPES:
            self.fail("argument_without_type")
        elif self._key in self._values:
            self.fail("repeated_argument")

    def push(self, data: bytes) -> None:
        """Bytes of the open argument's value."""
        self._body += data

    def close_argument(self) -> None:
        try:
            text = self._body.decode("utf-8")
            self._values[self._key] = _value_json(text, self._type)
        except ValueError:
            self.fail("argument_not_json")

    def arguments(self) -> str:
        """The call's arguments: strings quoted, every other value byte for byte as it came."""
        pairs = (f"{argument_json.quote(key)}: {value}" for key, value in self._values.items())
        return "{" + ", ".join(pairs) + "}"


def _value_json(text: str, kind: str) -> str:
    if kind == "string":
        return argument_json.quote(text)
    if argument_json.type_name(argument_json.parse(text)) != kind:
        raise ValueError(f"{text!r} is no {kind}")
    return text
