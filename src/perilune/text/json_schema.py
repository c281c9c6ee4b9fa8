"""JSON Schemas of requests, checked and cut down to what a grammar can hold.

A schema comes from a client, so its size and depth are bounded, and what a grammar cannot hold is
refused by its path. The result is a schema that accepts nothing that the original refuses.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from typing import Any

from perilune.text import schema_keywords
from perilune.text.json_pointer import resolve
from perilune.text.pattern import schema_pattern
from perilune.text.schema_cycles import check_cycles
from perilune.text.schema_keywords import MAX_DEPTH, check_number_of, digits_of, refuse

MAX_BYTES = 2**16
"""Of the result, which has no descriptions."""
MAX_REFS = 256
MAX_MULTIPLE = 1_000
"""Of the digits of multipleOf, and four times as much in a whole schema: the grammar library has a
state for every remainder."""

_REFUSED = (
    "not",
    "if",
    "contains",
    "uniqueItems",
    "propertyNames",
    "dependentRequired",
    "dependentSchemas",
    "dependencies",
    "unevaluatedItems",
    "unevaluatedProperties",
    "$dynamicRef",
    "$recursiveRef",
)

Schema = dict[str, Any]


def normalise(schema: object, *, root: object = None, at: str) -> Schema:
    """`schema` with only the keywords that a grammar holds.

    References into `root`, by default `schema` itself, become references into its own `$defs`.
    `at`: the field that it stands in, for errors.

    Raises:
        TextError: it is no JSON Schema, cannot be held to, or is too large.
    """
    return _Normaliser(schema if root is None else root, at).run(schema)


class _Normaliser:
    def __init__(self, root: object, at: str) -> None:
        self._root = root
        self._at = at
        self._names: dict[str, str] = {}
        """Name in `$defs` by pointer."""
        self._multiples = 0

    def run(self, schema: object) -> Schema:
        result = self._read(schema, self._at, 0)
        if result is False:
            refuse(self._at, "no value matches `false`")
        definitions: Schema = {}
        while len(definitions) < len(self._names):
            pointer, name = [*self._names.items()][len(definitions)]
            target = resolve(self._root, pointer, self._at)
            definitions[name] = self._read(target, f"{self._at} ({pointer})", 0)
        whole: Schema = {} if isinstance(result, bool) else result
        if definitions:
            whole["$defs"] = definitions
        check_cycles(whole, self._at)
        size = len(json.dumps(whole))
        if size > MAX_BYTES:
            refuse(self._at, f"{size} bytes without descriptions; at most {MAX_BYTES} are allowed")
        return whole

    def _read(self, schema: object, at: str, depth: int) -> Schema | bool:
        if isinstance(schema, bool):
            return schema
        if not isinstance(schema, Mapping):
            refuse(at, "a schema is an object or a boolean")
        if depth > MAX_DEPTH:
            refuse(at, f"schemas may be nested {MAX_DEPTH} deep")
        for key in _REFUSED:
            if schema.get(key, False) is not False:
                refuse(at, f"an answer cannot be held to `{key}`")
        result: Schema = {}
        for key, value in schema.items():
            if key in _INNER:
                result[key] = _INNER[key](self, value, f"{at}.{key}", depth + 1)
            elif key in schema_keywords.READERS:
                result[key] = schema_keywords.READERS[key](value, f"{at}.{key}")
        if isinstance(schema.get("items"), list):
            self._old_tuple(schema, result, at, depth + 1)
        _check_free_keys(result, at)
        return {key: value for key, value in result.items() if value is not None or key == "const"}

    def _inner(self, value: object, at: str, depth: int) -> Schema | bool | None:
        return None if isinstance(value, list) else self._read(value, at, depth)

    def _list(self, value: object, at: str, depth: int) -> list[Schema | bool]:
        if not isinstance(value, list) or not value:
            refuse(at, "a list of schemas is wanted")
        check_number_of("schemas", len(value), at)
        return [self._read(item, f"{at}[{i}]", depth) for i, item in enumerate(value)]

    def _map(self, value: object, at: str, depth: int) -> Schema:
        if not isinstance(value, Mapping):
            refuse(at, "an object of schemas is wanted")
        check_number_of("properties", len(value), at)
        return {key: self._read(item, f"{at}.{key}", depth) for key, item in value.items()}

    def _patterns(self, value: object, at: str, depth: int) -> Schema:
        schemas = self._map(value, at, depth)
        return {self._pattern(pattern, at, depth): inner for pattern, inner in schemas.items()}

    def _pattern(self, value: object, at: str, depth: int) -> str:
        return schema_pattern(schema_keywords.pattern(value, at))

    def _old_tuple(self, schema: Mapping[str, Any], result: Schema, at: str, depth: int) -> None:
        """Before 2020 `items` could be what now is `prefixItems`, `additionalItems` the rest."""
        result["prefixItems"] = self._list(schema["items"], f"{at}.items", depth)
        rest = schema.get("additionalItems", True)
        result["items"] = self._read(rest, f"{at}.additionalItems", depth)

    def _ref(self, value: object, at: str, depth: int) -> str:
        if not isinstance(value, str) or not value.startswith("#"):
            refuse(at, "only references within the schema ('#/…') are read")
        resolve(self._root, value, at)
        if value not in self._names:
            if len(self._names) == MAX_REFS:
                refuse(at, f"the schema has references to more than {MAX_REFS} places")
            self._names[value] = f"d{len(self._names)}"
        return f"#/$defs/{self._names[value]}"

    def _multiple(self, value: object, at: str, depth: int) -> int | float:
        multiple = schema_keywords.number(value, at)
        if multiple == 0:
            refuse(at, "0 has no multiples")
        digits = digits_of(multiple)
        self._multiples += digits
        if digits > MAX_MULTIPLE or self._multiples > 4 * MAX_MULTIPLE:
            refuse(at, f"{multiple} has more remainders than a grammar can count")
        return multiple


_INNER: dict[str, Callable[[_Normaliser, object, str, int], object]] = {
    "$ref": _Normaliser._ref,
    "anyOf": _Normaliser._list,
    "oneOf": _Normaliser._list,
    "allOf": _Normaliser._list,
    "properties": _Normaliser._map,
    "patternProperties": _Normaliser._patterns,
    "additionalProperties": _Normaliser._inner,
    "pattern": _Normaliser._pattern,
    "items": _Normaliser._inner,
    "prefixItems": _Normaliser._list,
    "multipleOf": _Normaliser._multiple,
}
"""With `schema_keywords.READERS` every keyword that is kept; the others only describe."""


def _check_free_keys(schema: Schema, at: str) -> None:
    """A grammar cannot tell whether two free keys differ, so no more than one may be asked for."""
    if schema.get("minProperties", 0) - len(schema.get("required") or ()) > 1:
        refuse(f"{at}.minProperties", "at most one more than in `required` can be held to")
