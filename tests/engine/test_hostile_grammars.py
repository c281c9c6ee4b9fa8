"""Schemas, expressions and grammars that mean harm, all the way from a request to its tokens.

Each is refused at once, or costs no more than an ordinary one: a step is shared by all sequences.
"""

from __future__ import annotations

import json
import time

import pytest

from perilune.core.errors import RequestError
from perilune.core.types import ChatRequest, Grammar, Message, ResponseFormat, TextPart
from perilune.engine.grammar_compiler import GrammarCompiler
from perilune.engine.grammar_state import GrammarState
from perilune.text.tiktoken_ranks import byte_level
from perilune.text.token_table import table_of
from perilune.text.xtml_format import XtmlFormat

XTML = XtmlFormat(byte_level())
COMPILE_S = 5.0
"""CPU time; most take a hundredth of it, and the worst a fifth."""


@pytest.fixture(scope="module")
def grammars() -> GrammarCompiler:
    tokenizer = XTML.tokenizer
    return GrammarCompiler(
        table_of(tokenizer), vocab_size=tokenizer.vocab_size, eos_ids=tokenizer.eos_ids
    )


def grammar_of(wanted: ResponseFormat, **fields) -> Grammar:
    message = Message(role="user", content=(TextPart(text="?"),))
    fields = {"thinking": False, "response_format": wanted, **fields}
    grammar = XTML.grammar(ChatRequest(request_id="r", model="m", messages=(message,), **fields))
    assert grammar is not None
    return grammar


def chain(length: int, link, last) -> dict:
    parts = {f"a{i}": link(f"#/$defs/a{i + 1}") for i in range(length)}
    return {"$ref": "#/$defs/a0", "$defs": {**parts, f"a{length}": last}}


def options(count: int, make) -> list:
    return [make(i) for i in range(count)]


SCHEMAS = {
    "deep": json.loads('{"items":' * 300 + "true" + "}" * 300),
    "chain": chain(3000, lambda ref: {"$ref": ref}, {"type": "null"}),
    "chain of lists": chain(250, lambda ref: {"items": {"$ref": ref}}, {"type": "null"}),
    "chain of unions": chain(250, lambda ref: {"anyOf": [{"$ref": ref}, {"type": "null"}]}, True),
    "doubled": chain(40, lambda ref: {"allOf": [{"$ref": ref}, {"$ref": ref}]}, {"minLength": 1}),
    "doubled unions": chain(
        40, lambda ref: {"anyOf": [{"$ref": ref}, {"$ref": ref}]}, {"const": 1}
    ),
    "product": {
        "allOf": options(
            16, lambda i: {"anyOf": [{"required": [f"a{i}"]}, {"required": [f"b{i}"]}]}
        )
    },
    "circle": chain(3, lambda ref: {"$ref": ref}, {"$ref": "#/$defs/a0"}),
    "many values": {"enum": options(100_000, lambda i: f"value {i}")},
    "some values": {"enum": options(5_000, lambda i: f"v{i}")},
    "a long value": {"const": "x" * 1_000_000},
    "many properties": {"properties": {f"p{i}": {} for i in range(100_000)}},
    "some properties": {"properties": {f"p{i}": {} for i in range(256)}},
    "properties everywhere": {
        "anyOf": options(8, lambda j: {"properties": {f"p{i}_{j}": {} for i in range(250)}})
    },
    "long lists": {"items": {"type": "string"}, "minItems": 9999, "maxItems": 10**12},
    "long texts": {"type": "string", "minLength": 9999, "maxLength": 10**12},
    "remainders": {"type": "integer", "multipleOf": 999_983},
    "many remainders": {"prefixItems": [{"type": "integer", "multipleOf": 997}] * 100},
    "numbers": {"type": "number", "minimum": -1e308, "maximum": 5e-324},
    "a growing pattern": {"type": "string", "pattern": "(a|b)*a(a|b){60}", "maxLength": 200},
    "patterns": {"allOf": options(10, lambda i: {"pattern": f"a.{{{i}}}b"}), "type": "string"},
    "a nested pattern": {"type": "string", "pattern": "(" * 100 + "[a-z]" + "x)*" * 100},
    "patterns of keys": {"patternProperties": {f"^x{i}": {} for i in range(200)}},
    "strange": {"type": "object", "properties": {"x": {"$ref": "#/properties"}}, "required": ["y"]},
}
PATTERNS = {
    "repeats": "((((a{99}){99}){99}){99}){99}",
    "stars": "((a*)*)*b",
    "growing": "(.*a){30}.*",
    "doubled": "(a|b)*a(a|b){300}",
    "optional": "(?:a?){3000}a{3000}",
    "unicode": r"\p{L}{900}[\s\S]{900}",
    "nested": "(" * 110 + "a" + "[a-z])*" * 110,
    "too nested": "(" * 1000 + "a" + ")*" * 1000,
    "long": "a" * 100_000,
    "unclosed": "(a",
    "looking ahead": "(?=a)b",
}
GRAMMARS = {
    "chain": "start: a0\na200: /x/\n" + "\n".join(f"a{i}: a{i + 1}" for i in range(200)),
    "terminals": "start: A0\nA200: /x/\n"
    + "\n".join(f"A{i}: (A{i + 1} /[a-z]/)*" for i in range(200)),
    "doubled": "start: A0\nA60: /x/\n" + "\n".join(f"A{i}: A{i + 1} A{i + 1}" for i in range(60)),
    "ambiguous": 'start: s\ns: s s s | s s | "" | /a/',
    "itself": "start: start",
    "brackets": "start: " + "(" * 4000 + '"a"' + ")" * 4000,
    "negated": "start: A\nA: ~(/(a|b)*a(a|b){15}/ & ~/(.*c){12}/)",
    "rules": "start: a0\n" + "\n".join(f"a{i}:/x/" for i in range(600)),
    "long": "start: /" + "a" * 100_000 + "/",
    "json": 'start: %json {"type": "integer", "multipleOf": 999983}',
    "tokens": "start: <[*]>*",
    "no rule": "x",
    "control": 'start: "a" stop\nstop[stop="b"]: /[a-z]*/',
}
CASES = {
    **{f"schema {k}": ResponseFormat(type="json_schema", schema=v) for k, v in SCHEMAS.items()},
    **{f"pattern {k}": ResponseFormat(type="regex", pattern=v) for k, v in PATTERNS.items()},
    **{f"grammar {k}": ResponseFormat(type="grammar", grammar=v) for k, v in GRAMMARS.items()},
}


def start(grammars: GrammarCompiler, wanted: ResponseFormat, **fields) -> GrammarState:
    return grammars.start(grammar_of(wanted, **fields), XTML.stop_ids)


def calling(parameters: object) -> dict[str, object]:
    function = {"name": "f", "parameters": parameters}
    return {"tools": ({"type": "function", "function": function},), "tool_choice": "required"}


def outcome(grammars: GrammarCompiler, wanted: ResponseFormat, **fields) -> GrammarState | None:
    """None for one that is refused."""
    begin_s = time.process_time()
    state = error = None
    try:
        state = start(grammars, wanted, **fields)
    except RequestError as refused:
        error = refused
    assert time.process_time() - begin_s < COMPILE_S
    assert error is None or (error.status == 400 and len(str(error)) < 600)
    return state


@pytest.mark.parametrize("name", CASES)
def test_it_is_refused_or_cheap(name, grammars):
    state = outcome(grammars, CASES[name])
    for token_id in b'{"p1":"aaaaaaaaaaaaaaaaaaaaaa' if state else b"":
        mask = state.allowed()
        if mask is None or not mask[token_id >> 3] >> (token_id & 7) & 1:
            return
        state.advance(token_id)


@pytest.mark.parametrize("name", SCHEMAS)
def test_so_it_is_as_arguments(name, grammars):
    """This format takes such a schema apart by type."""
    parameters = {"properties": {"x": SCHEMAS[name]}, "required": ["x"]}
    outcome(grammars, ResponseFormat(), **calling(parameters))


@pytest.mark.parametrize(
    ("wanted", "message", "param"),
    [
        (
            {"type": "json_schema", "schema": {"properties": {"a": {"not": {}}}}},
            "`not`",
            "response_format.json_schema.schema.properties.a",
        ),
        (
            {"type": "json_schema", "schema": {"oneOf": [{"minLength": 1}, {"maxLength": 3}]}},
            "oneOf constraints are not supported",
            "response_format.json_schema.schema",
        ),
        ({"type": "json_schema"}, "needs a schema", "response_format"),
        ({"type": "regex", "pattern": "(a"}, "unclosed group", "response_format.pattern"),
        ({"type": "regex", "pattern": "a" * 5000}, "at most 4096", "response_format.pattern"),
        ({"type": "grammar", "grammar": "start: %json {}"}, "%json", "response_format.grammar"),
        ({"type": "grammar", "grammar": "a:\n" * 300}, "256 rules", "response_format.grammar"),
    ],
)
def test_what_is_wrong_is_named(wanted, message, param, grammars):
    with pytest.raises(RequestError, match=message) as refused:
        start(grammars, ResponseFormat(**wanted))
    assert refused.value.param == param


@pytest.mark.parametrize(
    ("parameters", "message", "where"),
    [
        ({"properties": {"a": {"pattern": "(?=a)"}}}, "look-around", ".properties.a"),
        ({"properties": {"a": {"pattern": "a$b"}}}, "ends", ".properties.a"),
        ({"properties": {"a": {"enum": [1], "type": "null"}}}, "no value", ".properties.a"),
        ({"properties": {"a": {"if": {}}}}, "`if`", ".properties.a"),
        ({"anyOf": [{}]}, "an object with `properties`", ""),
        ({"minProperties": 1}, "minProperties", ""),
        ({"required": ["b"], "additionalProperties": False}, "required", ".properties.b"),
        (
            {"properties": {"a": {"oneOf": [{"minLength": 1}, {"maxLength": 3}]}}},
            "only one branch",
            ".properties.a.oneOf",
        ),
    ],
)
def test_so_it_is_in_a_tool(parameters, message, where, grammars):
    with pytest.raises(RequestError, match=message) as refused:
        start(grammars, ResponseFormat(), **calling(parameters))
    assert refused.value.param == f"tools[0].function.parameters{where}"
