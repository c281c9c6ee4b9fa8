"""A schema taken apart by type, for formats that write a value's type beside it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from perilune.text import argument_json
from perilune.text.json_schema import Schema
from perilune.text.pattern import whole_text
from perilune.text.schema_keywords import refuse
from perilune.text.string_formats import FORMATS

ARGUMENT_TYPES = ("string", "number", "boolean", "null", "object", "array")
"""K3's names: an integer is a number."""

_MAX_PARTS = 500
_MAX_OPTIONS = 2_000
_ANY_TEXT = "(?s:.*)"
_PREFIX = "#/$defs/"


class ByType:
    """A normalised schema: what of it is a string, and what of it is of another type."""

    def __init__(self, schema: Schema, at: str) -> None:
        self._schema = schema
        self._defs: Schema = schema.get("$defs", {})
        self._at = at
        self._num_parts = 0

    def restricted(self, kind: str) -> Schema | None:
        """The schema of the values of one type other than string; None if there are none."""
        result = self._restrict(self._schema, kind)
        if result is not None and self._defs:
            result["$defs"] = self._defs
        return result

    def _restrict(self, schema: Schema | bool, kind: str) -> Schema | None:
        self._count()
        if schema is False:
            return None
        if schema is True:
            return {"type": kind}
        if schema.keys() - {"$defs"} == {"$ref"}:
            return self._restrict(self._target(schema), kind)
        result: Schema = {**schema, "type": _type_within(schema.get("type"), kind)}
        parts: list[Schema] = []
        if result["type"] is None:
            return None
        if "const" in schema and _kind(schema["const"]) != kind:
            return None
        if "enum" in schema:
            result["enum"] = [value for value in schema["enum"] if _kind(value) == kind]
        if result.get("enum") == []:
            return None
        if "$ref" in schema:
            target = self._restrict(self._target(schema), kind)
            if target is None:
                return None
            del result["$ref"]
            parts.append(target)
        for key in ("anyOf", "oneOf"):
            if key in schema:
                result[key] = [r for s in schema[key] if (r := self._restrict(s, kind)) is not None]
                if not result[key]:
                    return None
        for part in schema.get("allOf", ()):
            restricted = self._restrict(part, kind)
            if restricted is None:
                return None
            parts.append(restricted)
        if parts:
            result["allOf"] = parts
        result.pop("$defs", None)
        return result

    def strings(self) -> list[list[str]]:
        """Regular expressions of the strings: one of the inner lists, in which all have to match.

        Empty if no string is allowed. Raises TextError for what cannot be said so.
        """
        return self._strings(self._schema)

    def _strings(self, schema: Schema | bool) -> list[list[str]]:
        self._count()
        if schema is False:
            return []
        if schema is True:
            return [[_ANY_TEXT]]
        if _type_within(schema.get("type"), "string") is None:
            return []
        options = [[*self._own(schema)]]
        for values in self._values(schema):
            texts = [_quoted(value) for value in values if isinstance(value, str)]
            options = self._product(options, [[text] for text in texts])
        for part in self._conjuncts(schema):
            options = self._product(options, part)
        return options

    def _own(self, schema: Schema) -> Iterator[str]:
        if "pattern" in schema:
            yield whole_text(schema["pattern"], self._at)
        if "format" in schema:
            yield FORMATS[schema["format"]]
        least, most = schema.get("minLength", 0), schema.get("maxLength", "")
        if least or most != "":
            yield f"(?s:.){{{least},{most}}}"

    def _values(self, schema: Schema) -> Iterator[list[Any]]:
        if "enum" in schema:
            yield schema["enum"]
        if "const" in schema:
            yield [schema["const"]]

    def _conjuncts(self, schema: Schema) -> Iterator[list[list[str]]]:
        if "$ref" in schema:
            yield self._strings(self._target(schema))
        for part in schema.get("allOf", ()):
            yield self._strings(part)
        if "anyOf" in schema:
            yield [option for part in schema["anyOf"] for option in self._strings(part)]
        if "oneOf" in schema:
            branches = [b for part in schema["oneOf"] if (b := self._strings(part))]
            if len(branches) > 1 and not _are_distinct(schema["oneOf"]):
                refuse(f"{self._at}.oneOf", "only one branch may allow strings; use `anyOf`")
            yield [option for branch in branches for option in branch]

    def _product(self, left: list[list[str]], right: list[list[str]]) -> list[list[str]]:
        if len(left) * len(right) > _MAX_OPTIONS:
            refuse(self._at, f"more than {_MAX_OPTIONS} alternatives for one text")
        return [[*a, *b] for a in left for b in right]

    def _target(self, schema: Schema) -> Schema | bool:
        return self._defs[schema["$ref"].removeprefix(_PREFIX)]

    def _count(self) -> None:
        self._num_parts += 1
        if self._num_parts > _MAX_PARTS:
            refuse(self._at, "the schema has too many parts to be taken apart by type")


def _type_within(declared: object, kind: str) -> str | None:
    """The JSON Schema type of `kind` that `declared` allows."""
    names = ARGUMENT_TYPES if declared is None else declared
    names = [names] if isinstance(names, str) else names
    assert isinstance(names, list | tuple)
    if kind in names:
        return kind
    return "integer" if kind == "number" and "integer" in names else None


def _are_distinct(branches: list[Schema | bool]) -> bool:
    """Whether every branch lists its values, and none is in two of them."""
    seen: list[object] = []
    for branch in branches:
        if branch is True or (branch and not branch.keys() & {"const", "enum"}):
            return False
        if branch:
            seen += [branch["const"]] if "const" in branch else branch["enum"]
    texts = [value for value in seen if isinstance(value, str)]
    return len(texts) == len(set(texts))


def _kind(value: object) -> str:
    if isinstance(value, int | float) and not isinstance(value, bool):
        return "number"
    return argument_json.type_name(value)


def _quoted(text: str) -> str:
    return "".join(c if c.isalnum() or c in " _" else f"\\x{{{ord(c):x}}}" for c in text)
