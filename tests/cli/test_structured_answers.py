"""nano behind the whole server, asked by the official client: answers by schemas, forced calls."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator

import jsonschema
import pytest
from openai import BadRequestError, OpenAI

from perilune.cli.local_model import bundled_dir

PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 20},
        "age": {"type": "integer", "minimum": 0, "maximum": 150},
        "likes": {"type": "array", "items": {"enum": ["tea", "chess"]}, "maxItems": 2},
    },
    "required": ["name", "age", "likes"],
    "additionalProperties": False,
}
WEATHER = {
    "type": "object",
    "properties": {
        "city": {"type": "string", "pattern": "^[A-Z][a-z]{1,11}$"},
        "days": {"type": "integer", "minimum": 1, "maximum": 9},
        "unit": {"enum": ["C", "F", None]},
    },
    "required": ["city", "unit"],
}
NUMBER = {"type": "number", "minimum": -1000, "maximum": 1000}
SUM = {"type": "object", "properties": {"a": NUMBER, "b": NUMBER}}
TOOLS = [
    {"type": "function", "function": {"name": "get_weather", "parameters": WEATHER}},
    {"type": "function", "function": {"name": "add", "parameters": SUM}},
]
SCHEMAS = {"get_weather": WEATHER, "add": SUM}
ASK = [{"role": "user", "content": "Mia is 31 years old. What is the weather in Oslo?"}]
SERVE = [sys.executable, "-m", "perilune.cli.main", "serve"]
NO_THOUGHTS = {"chat_template_kwargs": {"thinking": False}}


@pytest.fixture(scope="module")
def client() -> Iterator[OpenAI]:
    process = subprocess.Popen(
        [*SERVE, str(bundled_dir()), "--port", "0", "--threads", "1", "--device", "cpu"],
        stdout=subprocess.PIPE,
        text=True,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
    )
    assert process.stdout
    found = re.search(r"http://127\.0\.0\.1:\d+", process.stdout.readline())
    assert found
    with OpenAI(base_url=f"{found[0]}/v1", api_key="none", max_retries=0) as client:
        yield client
    process.send_signal(signal.SIGINT)
    process.communicate(timeout=60)


def ask(client: OpenAI, seed: int, **fields):
    fields = {"max_tokens": 400, "temperature": 1.5, "extra_body": NO_THOUGHTS, **fields}
    return client.chat.completions.create(model="nano", messages=ASK, seed=seed, **fields)


def by_schema(schema: object) -> dict:
    return {"type": "json_schema", "json_schema": {"name": "s", "strict": True, "schema": schema}}


@pytest.mark.parametrize("seed", range(4))
def test_a_schema_holds_in_a_stream(client, seed):
    stream = ask(client, seed, response_format=by_schema(PERSON), stream=True)
    chunks = [chunk.choices[0] for chunk in stream]
    text = "".join(chunk.delta.content or "" for chunk in chunks)
    assert chunks[-1].finish_reason == "stop"
    jsonschema.validate(json.loads(text), PERSON)


def test_choices_side_by_side_with_free_ones(client):
    free = ask(client, 0, temperature=0, max_tokens=30)
    held = ask(client, 1, response_format=by_schema(PERSON), n=4, logprobs=True, top_logprobs=5)
    for choice in held.choices:
        jsonschema.validate(json.loads(choice.message.content), PERSON)
        tokens = [item.token for item in choice.logprobs.content]
        assert "".join(tokens) == choice.message.content
        assert tokens[0].startswith("{")
        assert all(top.token.startswith("{") for top in choice.logprobs.content[0].top_logprobs)
    assert ask(client, 2, temperature=0, max_tokens=30).choices == free.choices


def test_thoughts_before_the_answer(client):
    answer = ask(client, 5, response_format=by_schema(PERSON), temperature=0, extra_body={})
    if answer.choices[0].finish_reason == "stop":
        jsonschema.validate(json.loads(answer.choices[0].message.content), PERSON)
    else:
        assert answer.choices[0].message.content == ""


@pytest.mark.parametrize("seed", range(4))
def test_a_required_call_is_made_with_valid_arguments(client, seed):
    message = ask(client, seed, tools=TOOLS, tool_choice="required").choices[0].message
    assert message.tool_calls
    assert not message.content
    for call in message.tool_calls:
        arguments = json.loads(call.function.arguments)
        jsonschema.validate(arguments, SCHEMAS[call.function.name])


@pytest.mark.parametrize("stream", [False, True])
def test_the_named_function_is_called_once(client, stream):
    choice = {"type": "function", "function": {"name": "add"}}
    answer = ask(client, 3, tools=TOOLS, tool_choice=choice, stream=stream)
    if stream:
        pieces = [chunk.choices[0] for chunk in answer]
        calls = [call for piece in pieces for call in piece.delta.tool_calls or []]
        assert pieces[-1].finish_reason == "tool_calls"
    else:
        calls = answer.choices[0].message.tool_calls
        assert answer.choices[0].finish_reason == "tool_calls"
    assert [call.function.name for call in calls] == ["add"]
    jsonschema.validate(json.loads(calls[0].function.arguments), SUM)


def test_one_call_where_they_may_not_be_parallel(client):
    options = {"tools": TOOLS, "tool_choice": "required", "parallel_tool_calls": False}
    for seed in range(3):
        assert len(ask(client, seed, **options).choices[0].message.tool_calls) == 1


def test_an_expression(client):
    wanted = {"response_format": {"type": "regex", "pattern": "(yes|no), [0-9]{2} %"}}
    text = ask(client, 0, extra_body=wanted | NO_THOUGHTS).choices[0].message.content
    assert re.fullmatch("(yes|no), [0-9]{2} %", text)


def test_a_token_limit_cuts_an_answer_and_says_so(client):
    choice = ask(client, 0, response_format=by_schema(PERSON), max_tokens=4).choices[0]
    assert choice.finish_reason == "length"
    assert choice.message.content.startswith("{")


def test_a_wrong_expression_is_refused_before_anything_streams(client):
    wanted = {"response_format": {"type": "regex", "pattern": "(a"}}
    for stream in (False, True):
        with pytest.raises(BadRequestError, match="unclosed group") as refused:
            ask(client, 0, extra_body=wanted, stream=stream)
        assert refused.value.param == "response_format.pattern"
        assert refused.value.code == "invalid_grammar"
