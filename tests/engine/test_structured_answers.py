"""Whole answers of both chat formats, held to random schemas, by a model that writes at random."""

from __future__ import annotations

import json
import re
from typing import Any

import jsonschema
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from perilune.core.types import (
    ChatRequest,
    EngineInfo,
    Message,
    ResponseFormat,
    SamplingParams,
    TextPart,
    TokenRequest,
)
from perilune.engine.admission import admit
from perilune.engine.core import EngineCore
from perilune.engine.fake_model import FakeModel
from perilune.engine.grammar_compiler import GrammarCompiler
from perilune.text import im_names
from perilune.text.chat import ChatFormat, ParsedMessage, parse_message
from perilune.text.im_format import ImFormat
from perilune.text.tiktoken_ranks import RankTokenizer, byte_level, byte_ranks
from perilune.text.token_table import table_of
from perilune.text.xtml_format import XtmlFormat

MAX_TOKENS = 1200
_IM_IDS = im_names.special_ids(256)
XTML: ChatFormat = XtmlFormat(byte_level())
IM: ChatFormat = ImFormat(RankTokenizer(byte_ranks(), _IM_IDS, [_IM_IDS["<|im_end|>"]]))
FORMATS = {"xtml": XTML, "im": IM}
formats = st.sampled_from(["xtml", "im"])


@pytest.fixture(scope="module")
def compilers() -> dict[str, GrammarCompiler]:
    return {
        name: GrammarCompiler(
            table_of(f.tokenizer), vocab_size=f.tokenizer.vocab_size, eos_ids=f.tokenizer.eos_ids
        )
        for name, f in FORMATS.items()
    }


def request_of(seed: int, **fields: Any) -> ChatRequest:
    return ChatRequest(
        request_id="r",
        model="m",
        messages=(Message(role="user", content=(TextPart(text=f"question {seed}"),)),),
        sampling=SamplingParams(seed=seed),
        **fields,
    )


def answer(
    request: ChatRequest,
    name: str,
    compilers: dict[str, GrammarCompiler],
    favoured: str = '"]},',
    may_be_cut: bool = False,
) -> ParsedMessage:
    """What comes of the request at temperature 1, with a bias for what brings things to an end."""
    chat_format = FORMATS[name]
    tokenizer = chat_format.tokenizer
    ends = [*map(ord, favoured), *tokenizer.control_ids]
    sampling = SamplingParams(seed=request.sampling.seed, logit_bias=dict.fromkeys(ends, 9.0))
    tokens = TokenRequest(
        request_id="r",
        prompt_ids=tuple(chat_format.encode(request)),
        max_tokens=MAX_TOKENS,
        sampling=sampling,
        stop_ids=chat_format.stop_ids,
        grammar=chat_format.grammar(request),
    )
    info = EngineInfo(
        model_id="fake",
        vocab_size=tokenizer.vocab_size,
        max_context=100_000,
        eos_ids=tokenizer.eos_ids,
    )
    model = FakeModel(tokenizer.vocab_size)
    model.logits = _recent(model)
    core = EngineCore(model, prefill_budget=100_000)
    sequence = admit(tokens, info, compilers[name])
    core.add(sequence)
    while core.scheduler.has_work:
        for item in core.step():
            assert item.event.error is None
    parsed = parse_message(chat_format.parser(request), sequence.generated_ids)
    if not may_be_cut:
        assert sequence.finish_reason == "stop", tokenizer.decode(sequence.generated_ids)
        assert parsed.notes == ()
    assert not {note.kind for note in parsed.notes} & {"malformed", "repaired"}
    return parsed


def _recent(model: FakeModel):
    """The fake's logits after the last tokens only: a long answer would take the square of its
    length, and one that repeats itself is caught by the length, which tells apart."""
    logits = model.logits
    return lambda ids: logits([len(ids), *ids[-4:]])


# --- schemas that can be held to, and that something matches ---------------------------------

TEXT = st.text('abcé "\\\n/<&', max_size=5)
KEYS = st.one_of(
    st.sampled_from(["a", "b", "title", "type", "$ref"]), st.text('k"&é ', min_size=1, max_size=3)
)
LENGTHS = st.tuples(st.integers(0, 3), st.integers(0, 3)).map(
    lambda two: {"minLength": two[0], "maxLength": two[0] + two[1]}
)
PATTERNS = st.sampled_from(
    ["^[a-c]{1,3}$", "b", "^a|b$", r"^\d{2}-\w", "", "^$", r"^[^a-z\d]{2}$", "^(ab|c)+$", r"^\/x\."]
)
DESCRIBED = st.sampled_from(
    [{}, {}, {"title": "t"}, {"description": "d"}, {"default": 3}, {"format": "of-our-own"}]
)


def strings() -> st.SearchStrategy[dict[str, Any]]:
    return st.one_of(
        LENGTHS.map(lambda lengths: {"type": "string", **lengths}),
        PATTERNS.map(lambda pattern: {"type": "string", "pattern": pattern, "maxLength": 30}),
        st.sampled_from(["date", "time", "date-time", "uuid", "ipv4", "email"]).map(
            lambda name: {"type": "string", "format": name}
        ),
    )


def numbers() -> st.SearchStrategy[dict[str, Any]]:
    bounds = st.tuples(st.integers(-50, 50), st.integers(10, 1000))
    return st.one_of(
        bounds.map(lambda b: {"type": "integer", "minimum": b[0], "maximum": b[0] + b[1]}),
        bounds.map(lambda b: {"type": "number", "exclusiveMinimum": b[0], "maximum": b[0] + b[1]}),
        st.integers(2, 9).map(
            lambda m: {"type": "integer", "multipleOf": m, "minimum": -90, "maximum": 90}
        ),
    )


def values() -> st.SearchStrategy[Any]:
    plain = st.one_of(TEXT, st.integers(-99, 99), st.booleans(), st.none())
    return st.one_of(plain, st.lists(plain, max_size=2), st.dictionaries(TEXT, plain, max_size=2))


def leaves() -> st.SearchStrategy[dict[str, Any]]:
    return st.one_of(
        strings(),
        numbers(),
        st.sampled_from([{"type": "boolean"}, {"type": "null"}, {"$ref": "#/$defs/shared"}]),
        st.lists(values(), min_size=1, max_size=3).map(lambda enum: {"enum": enum}),
        values().map(lambda value: {"const": value}),
        st.just({"type": ["integer", "null"], "minimum": 3, "maximum": 99}),
    )


def objects(inner: st.SearchStrategy[Any]) -> st.SearchStrategy[dict[str, Any]]:
    def with_required(properties: dict[str, Any]) -> st.SearchStrategy[dict[str, Any]]:
        names = st.lists(st.sampled_from([*properties]), unique=True) if properties else st.just([])
        return names.map(
            lambda required: {
                "type": "object",
                "properties": properties,
                "required": required,
                "additionalProperties": False,
            }
        )

    return st.dictionaries(KEYS, inner, max_size=3).flatmap(with_required)


def larger(inner: st.SearchStrategy[Any]) -> st.SearchStrategy[dict[str, Any]]:
    return st.one_of(
        objects(inner),
        st.tuples(inner, st.integers(0, 1), st.integers(1, 2)).map(
            lambda t: {"type": "array", "items": t[0], "minItems": t[1], "maxItems": t[2]}
        ),
        st.lists(inner, min_size=1, max_size=2).map(
            lambda parts: {"type": "array", "prefixItems": parts, "items": False}
        ),
        st.lists(inner, min_size=1, max_size=3).map(lambda parts: {"anyOf": parts}),
    )


described = st.tuples(leaves(), DESCRIBED).map(lambda two: {**two[1], **two[0]})
inner_schemas = st.recursive(described, larger, max_leaves=5)
shared = st.one_of(strings(), numbers())


def with_shared(schema: dict[str, Any], target: dict[str, Any]) -> dict[str, Any]:
    return {**schema, "$defs": {"shared": target}}


schemas = st.builds(with_shared, inner_schemas, shared)
parameters = st.builds(with_shared, objects(inner_schemas), shared)


def check(value: Any, schema: dict[str, Any]) -> None:
    checker = jsonschema.FormatChecker(["date", "ipv4", "email", "uuid"])
    jsonschema.Draft202012Validator(schema, format_checker=checker).validate(value)


# ---------------------------------------------------------------------------------------------


@settings(max_examples=80)
@given(schema=schemas, seed=st.integers(0, 99), name=formats, thinking=st.booleans())
def test_text_by_a_schema(schema, seed, name, thinking, compilers):
    wanted = ResponseFormat(type="json_schema", schema=schema)
    request = request_of(seed, response_format=wanted, thinking=thinking)
    check(json.loads(answer(request, name, compilers).text), schema)


@settings(max_examples=60)
@given(
    both=st.tuples(parameters, parameters),
    seed=st.integers(0, 99),
    name=formats,
    choice=st.sampled_from(["required", "single", "named", "auto"]),
)
def test_calls_by_their_schemas(both, seed, name, choice, compilers):
    names = ["get", 'get_"more"&<|sep|>' if name == "xtml" else "get_more"]
    strict = {"strict": True} if choice == "auto" else {}
    tools = tuple(
        {"type": "function", "function": {"name": n, "parameters": p, **strict}}
        for n, p in zip(names, both, strict=True)
    )
    request = request_of(
        seed,
        tools=tools,
        tool_choice="auto" if choice == "auto" else "required",
        tool_choice_name=names[1] if choice == "named" else None,
        parallel_tool_calls=choice == "required",
    )
    parsed = answer(request, name, compilers, may_be_cut=choice == "required")
    calls = parsed.tool_calls
    for call in calls:
        check(json.loads(call.arguments), both[names.index(call.name)])
    if choice != "auto":
        assert calls
        assert parsed.text == ""
    if choice != "required":
        assert len(calls) <= 1
    if choice == "named":
        assert calls[0].name == names[1]


@settings(max_examples=25)
@given(seed=st.integers(0, 999), name=formats)
def test_any_json_object(seed, name, compilers):
    request = request_of(seed, response_format=ResponseFormat(type="json_object"))
    text = answer(request, name, compilers).text
    assert isinstance(json.loads(text), dict)
    assert not re.search(r"[ \t\n]{67}", text)


@settings(max_examples=15)
@given(seed=st.integers(0, 999), name=formats)
def test_a_pattern_and_a_grammar(seed, name, compilers):
    pattern = r"(yes|no)/\d{1,3}"
    request = request_of(seed, response_format=ResponseFormat(type="regex", pattern=pattern))
    assert re.fullmatch(pattern, answer(request, name, compilers).text)
    lark = 'start: sum\nsum: NUMBER | sum "+" NUMBER\nNUMBER: /[0-9]{1,3}/'
    request = request_of(seed, response_format=ResponseFormat(type="grammar", grammar=lark))
    assert re.fullmatch(r"\d{1,3}(\+\d{1,3})*", answer(request, name, compilers).text)


@pytest.mark.parametrize("name", FORMATS)
def test_text_or_calls_where_both_are_offered(name, compilers):
    schema = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
    tool = {"type": "function", "function": {"name": "f", "parameters": schema, "strict": True}}
    seen = set()
    for seed in range(20):
        wanted = ResponseFormat(type="json_schema", schema=schema)
        request = request_of(seed, tools=(tool,), response_format=wanted)
        parsed = answer(request, name, compilers, favoured='"]},{')
        for text in [call.arguments for call in parsed.tool_calls] or [parsed.text]:
            check(json.loads(text), schema)
        assert bool(parsed.text) != bool(parsed.tool_calls)
        seen.add(bool(parsed.text))
    assert seen == {True, False}


@pytest.mark.parametrize("name", FORMATS)
def test_no_call_where_none_is_wanted(name, compilers):
    tool = {"type": "function", "function": {"name": "f"}}
    for seed in range(10):
        parsed = answer(request_of(seed, tools=(tool,), tool_choice="none"), name, compilers)
        assert parsed.tool_calls == ()


@pytest.mark.parametrize("name", FORMATS)
def test_a_tool_that_is_not_strict_gets_well_formed_arguments(name, compilers):
    unheld = {"type": "object", "properties": {"a": {"not": {}}, "b": {}}, "required": ["a"]}
    tool = {"type": "function", "function": {"name": "f", "parameters": unheld, "strict": False}}
    for seed in range(5):
        parsed = answer(request_of(seed, tools=(tool,), tool_choice="required"), name, compilers)
        assert all(isinstance(json.loads(call.arguments), dict) for call in parsed.tool_calls)


@pytest.mark.parametrize("name", FORMATS)
def test_a_request_that_holds_an_answer_to_nothing_has_no_grammar(name):
    tool = {"type": "function", "function": {"name": "f"}}
    assert FORMATS[name].grammar(request_of(0)) is None
    assert FORMATS[name].grammar(request_of(0, tools=(tool,))) is None
