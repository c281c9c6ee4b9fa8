"""Schemas that mean themselves, with no object or array in between: nothing ever matches them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from perilune.text.schema_keywords import refuse

_PREFIX = "#/$defs/"


def check_cycles(schema: Mapping[str, Any], at: str) -> None:
    """Raises TextError for such a cycle in a normalised schema; `at` is its field."""
    targets = {name: set(_targets(body)) for name, body in schema.get("$defs", {}).items()}
    open_names = dict.fromkeys(targets)
    while open_names:
        free = [name for name in open_names if not targets[name] & open_names.keys()]
        if not free:
            refuse(at, "a schema refers to itself in a circle")
        for name in free:
            del open_names[name]


def _targets(schema: object) -> Iterator[str]:
    """Names of the schemas that the same value has to match."""
    if not isinstance(schema, Mapping):
        return
    if "$ref" in schema:
        yield schema["$ref"].removeprefix(_PREFIX)
    for key in ("anyOf", "oneOf", "allOf"):
        for branch in schema.get(key, ()):
            yield from _targets(branch)
