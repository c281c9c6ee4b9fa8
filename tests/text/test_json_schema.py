"""Schemas of requests: what is kept, what is refused by its path, and what is too much."""

from __future__ import annotations

import json
from typing import Any

import jsonschema
import pytest
from hypothesis import given
from hypothesis import strategies as st

from perilune.text.errors import TextError
from perilune.text.json_schema import normalise


def nested(depth: int) -> dict[str, Any]:
    schema: dict[str, Any] = {"type": "string"}
    for _ in range(depth):
        schema = {"type": "array", "items": schema}
    return schema


def test_what_only_describes_is_left_out():
    schema = {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "title": "T",
        "x-guidance": {"lenient": True},
        "type": "object",
        "properties": {
            "title": {"type": "string", "description": "d", "format": "of-our-own"},
            "n": {"const": None, "default": 3},
        },
    }
    assert normalise(schema, at="s") == {
        "type": "object",
        "properties": {"title": {"type": "string"}, "n": {"const": None}},
    }


def test_references_bring_what_they_point_at_and_nothing_else():
    schema = {
        "properties": {"a/b": {"$ref": "#/$defs/x"}, "c": {"$ref": "#/properties/a~1b"}},
        "$defs": {"x": {"items": {"$ref": "#"}}, "unused": {"not": {}}},
    }
    assert normalise(schema, at="s") == {
        "properties": {"a/b": {"$ref": "#/$defs/d0"}, "c": {"$ref": "#/$defs/d1"}},
        "$defs": {
            "d0": {"items": {"$ref": "#/$defs/d2"}},
            "d1": {"$ref": "#/$defs/d0"},
            "d2": {"properties": {"a/b": {"$ref": "#/$defs/d0"}, "c": {"$ref": "#/$defs/d1"}}},
        },
    }


def test_a_part_is_read_within_its_whole():
    root = {"$defs": {"x": {"type": "null"}}}
    assert normalise({"$ref": "#/$defs/x"}, root=root, at="s")["$defs"] == {"d0": {"type": "null"}}


def test_tuples_of_older_drafts():
    old = {"items": [{"type": "null"}], "additionalItems": False}
    assert normalise(old, at="s") == {"prefixItems": [{"type": "null"}], "items": False}


@pytest.mark.parametrize(
    ("schema", "param", "message"),
    [
        (3, "s", "an object or a boolean"),
        (False, "s", "no value matches"),
        ({"type": "strin"}, "s.type", '"strin" is no type'),
        ({"properties": {"a": {"not": {}}}}, "s.properties.a", "`not`"),
        ({"items": {"uniqueItems": True}}, "s.items", "`uniqueItems`"),
        ({"anyOf": [{}, {"if": {}}]}, "s.anyOf[1]", "`if`"),
        ({"anyOf": []}, "s.anyOf", "a list of schemas"),
        ({"properties": []}, "s.properties", "an object of schemas"),
        ({"enum": []}, "s.enum", "a list of values"),
        ({"enum": "a"}, "s.enum", "a list of values"),
        ({"required": [1]}, "s.required", "a list of names"),
        ({"minLength": -1}, "s.minLength", "whole number"),
        ({"minLength": True}, "s.minLength", "whole number"),
        ({"minItems": 10**9}, "s.minItems", "at most 10000"),
        ({"pattern": 3}, "s.pattern", "regular expression"),
        ({"patternProperties": {"a" * 3000: {}}}, "s.patternProperties", "3000 characters"),
        ({"maximum": "3"}, "s.maximum", "a number"),
        ({"maximum": 1e300}, "s.maximum", "up to 1e18"),
        ({"exclusiveMinimum": True}, "s.exclusiveMinimum", "a number"),
        ({"multipleOf": 0}, "s.multipleOf", "no multiples"),
        ({"multipleOf": 0.1234567}, "s.multipleOf", "remainders"),
        ({"prefixItems": [{"multipleOf": 997}] * 9}, "s.prefixItems[4].multipleOf", "remainders"),
        ({"minProperties": 2}, "s.minProperties", "at most one more"),
        ({"$ref": "http://elsewhere/x"}, "s.$ref", "within the schema"),
        ({"$ref": "#name"}, "s.$ref", "by a path"),
        ({"$ref": "#/$defs/x"}, "s.$ref", "points at nothing"),
        ({"$ref": "#"}, "s", "in a circle"),
        (
            {"$ref": "#/$defs/a", "$defs": {"a": {"anyOf": [{"allOf": [{"$ref": "#/$defs/a"}]}]}}},
            "s",
            "in a circle",
        ),
        ({"$ref": "#/$defs/a", "$defs": {"a": {"not": {}}}}, "s (#/$defs/a)", "`not`"),
        (nested(33), "s" + ".items" * 33, "nested 32 deep"),
        ({"const": [[], json.loads("[" * 40 + "]" * 40)]}, "s.const", "nested 32 deep"),
        ({"properties": {str(i): {} for i in range(257)}}, "s.properties", "257 properties"),
        ({"anyOf": [{}] * 257}, "s.anyOf", "257 schemas"),
        ({"enum": ["x" * 70_000]}, "s", "at most 65536"),
        (
            {
                "prefixItems": [{"$ref": f"#/$defs/a{i}"} for i in range(200)],
                "items": {"prefixItems": [{"$ref": f"#/$defs/a{i}"} for i in range(200, 257)]},
                "$defs": {f"a{i}": {} for i in range(257)},
            },
            "s.items.prefixItems[56].$ref",
            "more than 256 places",
        ),
        ({"properties": {"k" * 10**5: {"not": {}}}}, None, "`not`"),
    ],
)
def test_what_cannot_be_held_to_is_named(schema, param, message):
    with pytest.raises(TextError, match=message) as refused:
        normalise(schema, at="s")
    assert param in (refused.value.param, None)
    assert len(str(refused.value)) < 400


names = st.sampled_from(["a", "b", "format", "items"])
values = st.recursive(
    st.one_of(st.none(), st.booleans(), st.integers(-5, 5), st.sampled_from(["", "a", "ab"])),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(names, inner, max_size=3),
    max_leaves=6,
)
schemas = st.recursive(
    st.one_of(
        st.booleans(),
        st.sampled_from(["string", "integer", "null", "array", "object"]).map(
            lambda t: {"type": t}
        ),
        st.lists(values, min_size=1, max_size=3).map(lambda v: {"enum": v}),
        values.map(lambda v: {"const": v}),
        st.just({"$ref": "#/$defs/x"}),
        st.builds(dict, minLength=st.integers(0, 2), maxItems=st.integers(0, 2)),
    ),
    lambda inner: st.one_of(
        st.builds(dict, properties=st.dictionaries(names, inner, max_size=3), title=names),
        st.builds(dict, items=inner, description=names),
        st.builds(dict, additionalProperties=inner, required=st.lists(names, max_size=2)),
        st.builds(dict, anyOf=st.lists(inner, min_size=1, max_size=2)),
        st.builds(dict, allOf=st.lists(inner, min_size=1, max_size=2)),
    ),
    max_leaves=6,
)


@given(schemas.filter(lambda s: s is not False), values)
def test_the_result_means_the_same(schema, value):
    whole = {"allOf": [schema], "$defs": {"x": {"type": ["string", "null"], "maxLength": 1}}}
    original = jsonschema.Draft202012Validator(whole)
    assert original.is_valid(value) == jsonschema.Draft202012Validator(
        normalise(whole, at="s")
    ).is_valid(value)
