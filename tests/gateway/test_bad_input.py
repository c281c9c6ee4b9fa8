"""Bad input: an OpenAI error body that names what is wrong, and the server goes on."""

from __future__ import annotations

import http.client
import json

import pytest

CHAT = "/v1/chat/completions"
COMPLETIONS = "/v1/completions"
USER = {"role": "user", "content": "hi"}
IMAGE = {"type": "image_url", "image_url": {"url": "data:image/png;base64,AA=="}}
TOOL = {"type": "function", "function": {"name": "f"}}


def post(served, path: str, body: bytes | str | dict):
    """(status, headers, JSON body)"""
    if isinstance(body, dict):
        body = json.dumps(body)
    data = body.encode() if isinstance(body, str) else body
    connection = http.client.HTTPConnection(*served.address, timeout=30)
    try:
        connection.request("POST", path, data)
        response = connection.getresponse()
        return response.status, response.headers, json.loads(response.read())
    finally:
        connection.close()


def chat(**fields) -> dict:
    return {"model": "fake", "messages": [USER], "max_tokens": 5} | fields


def completion(**fields) -> dict:
    return {"model": "fake", "prompt": "hi"} | fields


def check_refused(served, path, body, *, status=400, param=None, says="", code=None) -> None:
    """The error is as said, and the next request is served."""
    got, headers, answer = post(served, path, body)
    error = answer["error"]
    assert got == status, error
    assert set(answer) == {"error"}
    assert set(error) == {"message", "type", "param", "code"}
    assert error["param"] == param
    assert says in error["message"]
    assert error["code"] == code
    assert headers["content-type"] == "application/json"
    assert headers["x-request-id"]
    got, _, answer = post(served, COMPLETIONS, completion())
    assert (got, answer["choices"][0]["text"]) == (200, "hi")


@pytest.mark.parametrize(
    ("body", "says"),
    [
        (b"", "body is empty"),
        (b"  \n", "body is empty"),
        (b'{"model": "fake",\n "messages": [}', "line 2, column 15 (character 32)"),
        (b'{"model": "fake", "messages": [', "line 1, column 32"),
        (b'{"model": "\xff"}', "not UTF-8: invalid start byte at byte 11"),
        (b'{"model": "fake", "temperature": NaN}', "not JSON"),
        (b'{"a":' + b"[" * 100_000 + b"]" * 100_000 + b"}", "nested too deeply"),
        (b"[1]", "expected `object`, got `array`"),
        (b"null", "expected `object`, got `null`"),
    ],
)
@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
def test_what_is_no_json_object(served, path, body, says):
    check_refused(served, path, body, says=says)


def test_text_behind_the_json_object(served):
    check_refused(served, COMPLETIONS, b'{"model": "", "prompt": ""} x', says="line 1, column 29")


@pytest.mark.parametrize(
    ("body", "param"),
    [
        (
            rb'{"model":"fake","messages":[{"role":"user","content":"\ud800"}]}',
            "messages[0].content",
        ),
        (rb'{"model":"\udc00 and more text","messages":[]}', "model"),
        (rb'{"model":"fake","unknown":["a",{"b":"\ud83d x"}]}', "unknown[1].b"),
        (rb'{"model":"fake","stop":["\udfff"]}', "stop[0]"),
    ],
)
def test_lone_surrogates(served, body, param):
    check_refused(served, CHAT, body, param=param, says="lone surrogate")


def test_a_lone_surrogate_in_a_key(served):
    body = rb'{"model":"fake","x":{"\ud800":1}}'
    check_refused(served, CHAT, body, param="a key in x", says="lone surrogate")


def test_a_surrogate_in_raw_bytes(served):
    check_refused(served, CHAT, b'{"model":"\xed\xa0\x80"}', says="not UTF-8")


@pytest.mark.parametrize(
    ("fields", "param", "says"),
    [
        ({"temperature": "hot"}, "temperature", "expected `float | null`, got `str`"),
        ({"temperature": -0.1}, "temperature", ">= 0"),
        ({"temperature": 2.1}, "temperature", "<= 2"),
        ({"top_p": 0}, "top_p", "> 0"),
        ({"top_p": 1.5}, "top_p", "<= 1"),
        ({"top_k": -2}, "top_k", ">= -1"),
        ({"min_p": 2}, "min_p", "<= 1"),
        ({"presence_penalty": 3}, "presence_penalty", "<= 2"),
        ({"frequency_penalty": -3}, "frequency_penalty", ">= -2"),
        ({"repetition_penalty": 0}, "repetition_penalty", "> 0"),
        ({"max_tokens": 0}, "max_tokens", ">= 1"),
        ({"max_tokens": -5}, "max_tokens", ">= 1"),
        ({"max_tokens": 1.5}, "max_tokens", "expected `int | null`, got `float`"),
        ({"max_tokens": True}, "max_tokens", "got `bool`"),
        ({"n": 0}, "n", ">= 1"),
        ({"n": 1_000_000}, "n", "<= 16"),
        ({"n": 10**40}, "n", ""),
        ({"seed": 2**63}, "seed", ""),
        ({"seed": "x"}, "seed", "got `str`"),
        ({"stop": ""}, "stop", "length >= 1"),
        ({"stop": ["a"] * 17}, "stop", "length <= 16"),
        ({"stop": ["a", 1]}, "stop[1]", "expected `str`, got `int`"),
        ({"logit_bias": {"x": 1}}, "logit_bias", "'x' is not a token id"),
        ({"logit_bias": {"1": 1, "01": 2}}, "logit_bias", "'01' is not a token id"),
        ({"logit_bias": {"٣": 1}}, "logit_bias", "'٣' is not a token id"),
        ({"logit_bias": {"1": 101}}, "logit_bias[...]", "<= 100"),
        ({"logit_bias": []}, "logit_bias", "expected `object | null`"),
        ({"stream": "yes"}, "stream", "expected `bool | null`"),
        ({"stream_options": {"include_usage": True}}, "stream_options", "`stream`"),
        ({"model": 7}, "model", "expected `str`, got `int`"),
    ],
)
@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
def test_shared_fields(served, path, fields, param, says):
    body = chat(**fields) if path == CHAT else completion(**fields)
    check_refused(served, path, body, param=param, says=says)


@pytest.mark.parametrize(
    ("fields", "param", "says"),
    [
        ({"messages": []}, "messages", "length >= 1"),
        ({"messages": None}, "messages", "expected `array`, got `null`"),
        ({"messages": "hi"}, "messages", "expected `array`, got `str`"),
        ({"messages": ["hi"]}, "messages[0]", "expected `object`, got `str`"),
        ({"messages": [{"content": "hi"}]}, "messages[0].role", "required field is missing"),
        ({"messages": [{"role": "user"}]}, "messages[0].content", "required field is missing"),
        ({"messages": [USER, {"role": "robot"}]}, "messages[1].role", "'robot'"),
        ({"messages": [{"role": "user", "content": 5}]}, "messages[0].content", "got `int`"),
        ({"messages": [{"role": "user", "content": None}]}, "messages[0].content", "got `null`"),
        ({"messages": [{"role": "tool", "content": "x"}]}, "messages[0].tool_call_id", "missing"),
        ({"max_completion_tokens": 0}, "max_completion_tokens", ">= 1"),
        ({"top_logprobs": 2}, "top_logprobs", "needs `logprobs`"),
        ({"logprobs": True, "top_logprobs": 21}, "top_logprobs", "<= 20"),
        ({"logprobs": 1}, "logprobs", "expected `bool | null`"),
        ({"tools": [{"type": "function"}]}, "tools[0].function", "required field is missing"),
        ({"tools": [TOOL, {"type": "x"}]}, "tools[1].type", "'x'"),
        (
            {"tools": [{"type": "function", "function": {"name": "a b"}}]},
            "tools[0].function.name",
            "",
        ),
        ({"tool_choice": "required"}, "tool_choice", "needs `tools`"),
        ({"tool_choice": "maybe", "tools": [TOOL]}, "tool_choice", "'maybe'"),
        ({"tool_choice": 1}, "tool_choice", "got `int`"),
        ({"functions": [{"name": "f"}]}, "functions", "use `tools`"),
        ({"response_format": {"type": "xml"}}, "response_format.type", "'xml'"),
        ({"response_format": {"type": "json_schema"}}, "response_format.json_schema", "missing"),
        ({"reasoning_effort": "huge"}, "reasoning_effort", "'huge'"),
        ({"chat_template_kwargs": {"thinking": 1}}, "chat_template_kwargs.thinking", "bool"),
    ],
)
def test_chat_fields(served, fields, param, says):
    check_refused(served, CHAT, chat(**fields), param=param, says=says)


def test_a_tool_choice_that_is_not_offered(served):
    choice = {"type": "function", "function": {"name": "g"}}
    body = chat(tools=[TOOL], tool_choice=choice)
    check_refused(served, CHAT, body, param="tool_choice.function.name", says="'g'")


def test_tools_in_a_later_system_message_are_checked(served):
    body = chat(messages=[USER, {"role": "system", "tools": [{"type": "function"}]}])
    check_refused(served, CHAT, body, param="messages[1].tools[0].function", says="missing")


def test_an_image(served):
    body = chat(messages=[{"role": "user", "content": [{"type": "text", "text": "?"}, IMAGE]}])
    check_refused(
        served,
        CHAT,
        body,
        param="messages[0].content",
        says="image",
        code="unsupported_content",
    )


def test_a_tool_result_without_its_call(served):
    body = chat(messages=[USER, {"role": "tool", "tool_call_id": "call_9", "content": "x"}])
    status, _, answer = post(served, CHAT, body)
    assert status == 400
    assert "call_9" in answer["error"]["message"]


@pytest.mark.parametrize(
    ("fields", "param", "says"),
    [
        ({"prompt": ""}, "prompt", "at least one character"),
        ({"prompt": []}, "prompt", "at least one"),
        ({"prompt": ["a", ""]}, "prompt", "at least one"),
        ({"prompt": [[]]}, "prompt", "at least one"),
        ({"prompt": None}, "prompt", "got `null`"),
        ({"prompt": {"a": 1}}, "prompt", "got `object`"),
        ({"prompt": [1, "a"]}, "prompt", "cannot be mixed"),
        ({"prompt": [1.5]}, "prompt[0]", "got `float`"),
        ({"prompt": [-1]}, "prompt[0]", ">= 0"),
        ({"prompt": ["a"] * 33}, "prompt", "at most 32"),
        ({"prompt": ["a"] * 32, "n": 16}, "n", "at most 64"),
        ({"logprobs": 21}, "logprobs", "<= 20"),
        ({"suffix": "x"}, "suffix", "not supported"),
        ({"best_of": 3}, "best_of", "only the value of `n`"),
        ({"echo": True, "logprobs": 1}, "echo", "`logprobs`"),
    ],
)
def test_completion_fields(served, fields, param, says):
    check_refused(served, COMPLETIONS, completion(**fields), param=param, says=says)


def test_a_missing_prompt(served):
    check_refused(served, COMPLETIONS, {"model": "fake"}, param="prompt", says="missing")


def test_an_id_outside_the_vocabulary(served):
    check_refused(served, COMPLETIONS, completion(prompt=[512]), says="512")


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
def test_a_prompt_longer_than_the_context(served, path, stream):
    text = "x" * 5000
    if path == CHAT:
        body = chat(messages=[{"role": "user", "content": text}], stream=stream)
    else:
        body = completion(prompt=text, stream=stream)
    check_refused(served, path, body, says="4096", code="context_length_exceeded")


@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
def test_an_unknown_model(served, path):
    body = (chat if path == CHAT else completion)(model="gpt-4")
    check_refused(
        served, path, body, status=404, param="model", says="'gpt-4'", code="model_not_found"
    )


@pytest.mark.parametrize("num_bytes", [4 * 2**20 + 1, 10_000_000])
def test_a_body_that_is_too_large(served, num_bytes):
    body = json.dumps(chat(padding="x" * num_bytes))
    check_refused(served, CHAT, body, status=413, says="4194304", code="payload_too_large")


def test_a_body_just_within_the_limit(served):
    rest = len(json.dumps(completion(padding="")))
    body = json.dumps(completion(padding="x" * (4 * 2**20 - rest)))
    assert len(body) == 4 * 2**20
    assert post(served, COMPLETIONS, body)[0] == 200


def test_a_huge_wrong_value_is_not_quoted_back_in_full(served):
    _, _, answer = post(served, CHAT, chat(reasoning_effort="x" * 100_000))
    assert len(answer["error"]["message"]) < 1000
