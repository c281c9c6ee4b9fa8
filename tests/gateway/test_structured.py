"""How a request says what its answer has to be, and what the engine is then asked for."""

from __future__ import annotations

import pytest
from openai import BadRequestError

ASK = [{"role": "user", "content": "hi"}]
OBJECT = {
    "type": "object",
    "properties": {"city": {"type": "string", "maxLength": 9}},
    "required": ["city"],
}
TOOL = {"type": "function", "function": {"name": "look_up", "parameters": OBJECT}}
NO_THOUGHTS = {"chat_template_kwargs": {"thinking": False}}


@pytest.fixture
def grammar_of(client, engine):
    """The text of the grammar that the engine gets with a request; None without one."""

    def grammar_of(**fields):
        options = {"extra_body": NO_THOUGHTS, **fields}
        client.chat.completions.create(model="fake", messages=ASK, max_tokens=1, **options)
        grammar = engine.requests[-1].grammar
        return None if grammar is None else grammar.text

    return grammar_of


def test_a_plain_request_has_no_grammar(grammar_of):
    assert grammar_of() is None
    assert grammar_of(response_format={"type": "text"}) is None
    assert grammar_of(tools=[TOOL]) is None
    assert grammar_of(tools=[TOOL], tool_choice="auto", parallel_tool_calls=True) is None


def test_a_schema_is_held_to_unless_it_is_not_strict(grammar_of):
    def held(**strict):
        schema = {"name": "place", "schema": OBJECT, **strict}
        return grammar_of(response_format={"type": "json_schema", "json_schema": schema})

    assert '"maxLength": 9' in held()
    assert held() == held(strict=True)
    assert "maxLength" not in held(strict=False)
    assert "%json" in held(strict=False)


def test_any_object(grammar_of):
    assert '"type": "object"' in grammar_of(response_format={"type": "json_object"})


def test_an_expression_and_a_grammar_of_the_client(grammar_of):
    regex = {"response_format": {"type": "regex", "pattern": r"a+/b"}, **NO_THOUGHTS}
    assert r"/a+\/b/" in grammar_of(extra_body=regex)
    lark = {"response_format": {"type": "grammar", "grammar": 'start: "yes" | "no"'}}
    assert "yes" in grammar_of(extra_body=lark | NO_THOUGHTS)


def test_thoughts_come_first_where_there_are_any(grammar_of):
    form = {"type": "json_object"}
    silent = grammar_of(response_format=form)
    thoughtful = grammar_of(response_format=form, extra_body=None)
    assert '"think"' in thoughtful
    assert '"think"' not in silent


@pytest.mark.parametrize(
    ("fields", "calls"),
    [
        ({"tool_choice": "required"}, "{1,64}"),
        ({"tool_choice": "required", "parallel_tool_calls": False}, "{1,1}"),
        ({"tool_choice": {"type": "function", "function": {"name": "look_up"}}}, "{1,1}"),
    ],
)
def test_calls(fields, calls, grammar_of):
    text = grammar_of(tools=[TOOL], **fields)
    assert f"call{calls}" in text
    assert r"tool=\"look_up\"" in text


def test_a_strict_tool_is_held_to_where_no_call_is_required(grammar_of):
    strict = {"type": "function", "function": {**TOOL["function"], "strict": True}}
    assert r"tool=\"look_up\"" in grammar_of(tools=[strict])
    assert "tools?" in grammar_of(tools=[strict])


def test_one_call_at_most_where_they_may_not_be_parallel(grammar_of):
    text = grammar_of(tools=[TOOL], parallel_tool_calls=False)
    assert "call{1,1}" in text
    assert "tools?" in text
    assert "maxLength" not in text


def test_no_call_where_none_is_wanted(grammar_of):
    assert "look_up" not in grammar_of(tools=[TOOL], tool_choice="none")


@pytest.mark.parametrize(
    ("fields", "param", "message"),
    [
        ({"type": "regex"}, "response_format.pattern", "required field is missing"),
        ({"type": "grammar"}, "response_format.grammar", "required field is missing"),
        ({"type": "json_schema"}, "response_format.json_schema", "required field is missing"),
        ({"type": "regex", "pattern": ""}, "response_format.pattern", "length"),
        ({"type": "regex", "pattern": "a" * 9999}, "response_format.pattern", "at most 4096"),
        (
            {"type": "json_schema", "json_schema": {"schema": {"items": {"not": {}}}}},
            "response_format.json_schema.schema.items",
            "cannot be held to `not`",
        ),
    ],
)
def test_a_wrong_one_is_one_clear_error(fields, param, message, client, engine):
    with pytest.raises(BadRequestError, match=message) as refused:
        client.chat.completions.create(
            model="fake", messages=ASK, extra_body={"response_format": fields, **NO_THOUGHTS}
        )
    assert refused.value.param == param
    assert engine.requests == []


def test_a_wrong_schema_of_a_tool_is_named(client, engine):
    wrong = {"name": "f", "parameters": {"properties": {"a": {"uniqueItems": True}}}}
    with pytest.raises(BadRequestError, match="uniqueItems") as refused:
        client.chat.completions.create(
            model="fake",
            messages=ASK,
            tools=[TOOL, {"type": "function", "function": wrong}],
            tool_choice="required",
            stream=True,
        )
    assert refused.value.param == "tools[1].function.parameters.properties.a"
    assert engine.requests == []
