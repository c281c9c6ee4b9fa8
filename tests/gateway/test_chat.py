"""/v1/chat/completions through the official client."""

from __future__ import annotations

import json

import pytest
from openai import OpenAI

from perilune.core.types import ToolCall
from perilune.text.tiktoken_ranks import byte_level
from perilune.text.xtml_format import XtmlFormat

HELLO = [{"role": "user", "content": "Hello"}]
WEATHER = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "Weather of a city",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}},
    },
}
CALLS = [
    ToolCall(id="", name="get_weather", arguments='{"city": "Köln"}'),
    ToolCall(id="", name="get_weather", arguments='{"city": "Paris", "days": 2}'),
]


def prompt_text(engine, index: int = -1) -> str:
    return byte_level().decode(engine.requests[index].prompt_ids)


def test_an_answer_has_text_reasoning_and_usage(client: OpenAI, engine, written_ids):
    engine.script = lambda request: written_ids("Grüße 👋", reasoning="Be polite.")
    answer = client.chat.completions.create(model="fake", messages=HELLO)
    choice = answer.choices[0]
    assert choice.message.content == "Grüße 👋"
    assert choice.message.reasoning_content == "Be polite."
    assert choice.message.role == "assistant"
    assert choice.finish_reason == "stop"
    assert answer.object == "chat.completion"
    assert answer.model == "fake"
    assert answer.id.startswith("chatcmpl-")
    usage = answer.usage
    assert usage.prompt_tokens == len(engine.requests[0].prompt_ids)
    assert usage.completion_tokens == len(written_ids("Grüße 👋", reasoning="Be polite."))
    assert usage.total_tokens == usage.prompt_tokens + usage.completion_tokens
    assert usage.completion_tokens_details.reasoning_tokens >= len("Be polite.")


def test_a_stream_joins_to_the_whole_answer(client: OpenAI, engine, written_ids):
    engine.script = lambda request: written_ids("Grüße 👋", reasoning="Be polite.")
    whole = client.chat.completions.create(model="fake", messages=HELLO)
    chunks = list(
        client.chat.completions.create(
            model="fake", messages=HELLO, stream=True, stream_options={"include_usage": True}
        )
    )
    assert {chunk.id for chunk in chunks} == {chunks[0].id}
    assert {chunk.object for chunk in chunks} == {"chat.completion.chunk"}
    *deltas, last, usage = chunks
    assert deltas[0].choices[0].delta.role == "assistant"
    assert all(chunk.usage is None for chunk in deltas)
    texts = [chunk.choices[0].delta.content or "" for chunk in deltas]
    assert "".join(texts) == "Grüße 👋"
    assert "�" not in "".join(texts)
    reasoning = [getattr(c.choices[0].delta, "reasoning_content", "") for c in deltas]
    assert "".join(reasoning) == "Be polite."
    assert last.choices[0].finish_reason == "stop"
    assert usage.choices == []
    assert usage.usage == whole.usage


def test_without_include_usage_no_chunk_speaks_of_usage(client: OpenAI, engine, written_ids):
    engine.script = lambda request: written_ids("x")
    chunks = list(client.chat.completions.create(model="fake", messages=HELLO, stream=True))
    assert all("usage" not in chunk.model_fields_set for chunk in chunks)
    assert chunks[-1].choices[0].finish_reason == "stop"


def test_tool_calls(client: OpenAI, engine, written_ids):
    engine.script = lambda request: written_ids("", calls=CALLS)
    answer = client.chat.completions.create(model="fake", messages=HELLO, tools=[WEATHER])
    choice = answer.choices[0]
    assert choice.finish_reason == "tool_calls"
    assert choice.message.content is None
    calls = choice.message.tool_calls
    assert [call.function.name for call in calls] == ["get_weather", "get_weather"]
    assert [json.loads(call.function.arguments) for call in calls] == [
        {"city": "Köln"},
        {"city": "Paris", "days": 2},
    ]
    assert len({call.id for call in calls}) == 2
    assert '"name":"get_weather"' in prompt_text(engine)


def test_streamed_tool_calls_carry_index_id_and_type(client: OpenAI, engine, written_ids):
    engine.script = lambda request: written_ids("Wait.", calls=CALLS)
    stream = client.chat.completions.create(
        model="fake", messages=HELLO, tools=[WEATHER], stream=True
    )
    chunks = list(stream)
    pieces = [call for c in chunks for call in c.choices[0].delta.tool_calls or ()]
    assert [(piece.index, piece.type, piece.function.name) for piece in pieces] == [
        (0, "function", "get_weather"),
        (1, "function", "get_weather"),
    ]
    assert all(piece.id for piece in pieces)
    assert chunks[-1].choices[0].finish_reason == "tool_calls"


def test_a_replayed_turn_reaches_the_model_unchanged(client: OpenAI, engine, written_ids):
    engine.script = lambda request: written_ids("", reasoning="Ask <the> API.", calls=CALLS[:1])
    first = client.chat.completions.create(model="fake", messages=HELLO, tools=[WEATHER])
    message = first.choices[0].message
    engine.script = lambda request: written_ids("Sunny.")
    client.chat.completions.create(
        model="fake",
        tools=[WEATHER],
        messages=[
            *HELLO,
            message.model_dump(exclude_none=True),
            {"role": "tool", "tool_call_id": message.tool_calls[0].id, "content": "sun"},
        ],
    )
    written = byte_level().decode(written_ids("", reasoning="Ask <the> API.", calls=CALLS[:1]))
    assert written in prompt_text(engine)


@pytest.mark.parametrize("choice", ["none", "required"])
def test_tool_choice_reaches_the_prompt(client: OpenAI, engine, written_ids, choice):
    engine.script = lambda request: written_ids("ok")
    client.chat.completions.create(
        model="fake", messages=HELLO, tools=[WEATHER], tool_choice=choice
    )
    assert f"`tool_choice={choice}`" in prompt_text(engine)


def test_a_named_tool_is_the_only_one_offered(client: OpenAI, engine, written_ids):
    other = {"type": "function", "function": {"name": "other"}}
    engine.script = lambda request: written_ids("", calls=CALLS[:1])
    client.chat.completions.create(
        model="fake",
        messages=HELLO,
        tools=[other, WEATHER],
        tool_choice={"type": "function", "function": {"name": "get_weather"}},
    )
    assert '"name":"get_weather"' in prompt_text(engine)
    assert '"name":"other"' not in prompt_text(engine)


def test_n_choices_run_with_seeds_of_their_own(client: OpenAI, engine, written_ids):
    engine.script = lambda request: written_ids(f"seed {request.sampling.seed}")
    answer = client.chat.completions.create(model="fake", messages=HELLO, n=3, seed=41)
    assert [choice.index for choice in answer.choices] == [0, 1, 2]
    assert [c.message.content for c in answer.choices] == ["seed 41", "seed 42", "seed 43"]
    assert len({request.request_id for request in engine.requests}) == 1
    assert answer.usage.prompt_tokens == len(engine.requests[0].prompt_ids)
    assert answer.usage.completion_tokens == 3 * len(written_ids("seed 41"))


def test_n_choices_stream_side_by_side(client: OpenAI, engine, written_ids):
    engine.script = lambda request: written_ids(f"seed {request.sampling.seed}")
    chunks = list(
        client.chat.completions.create(model="fake", messages=HELLO, n=2, seed=1, stream=True)
    )
    texts = {0: "", 1: ""}
    for chunk in chunks:
        for choice in chunk.choices:
            texts[choice.index] += choice.delta.content or ""
    assert texts == {0: "seed 1", 1: "seed 2"}
    indices = [chunk.choices[0].index for chunk in chunks]
    assert indices != sorted(indices)


def test_logprobs_cover_the_answer_token_by_token(client: OpenAI, engine, written_ids):
    engine.script = lambda request: written_ids("aé", reasoning="r")
    answer = client.chat.completions.create(
        model="fake", messages=HELLO, logprobs=True, top_logprobs=2
    )
    logprobs = answer.choices[0].logprobs
    assert bytes(byte for item in logprobs.content for byte in item.bytes) == "aé".encode()
    first = logprobs.content[0]
    assert (first.token, first.logprob) == ("a", -0.5)
    assert [(top.token, top.logprob) for top in first.top_logprobs] == [("a", -0.5), ("b", -1.5)]
    assert [item["token"] for item in logprobs.reasoning_content] == ["r"]


def test_streamed_logprobs_equal_those_of_the_whole(client: OpenAI, engine, written_ids):
    engine.script = lambda request: written_ids("one two", reasoning="r")
    args = {"model": "fake", "messages": HELLO, "logprobs": True, "top_logprobs": 1}
    whole = client.chat.completions.create(**args).choices[0].logprobs.content
    chunks = client.chat.completions.create(**args, stream=True)
    pieces = [c.choices[0].logprobs for c in chunks if c.choices[0].logprobs]
    assert [item for piece in pieces for item in piece.content] == whole


def test_a_stop_string_ends_the_answer(client: OpenAI, engine, written_ids):
    engine.script = lambda request: written_ids("one, STOP, two", reasoning="STOP is the word")
    answer = client.chat.completions.create(
        model="fake", messages=HELLO, stop=["STOP"], logprobs=True
    )
    choice = answer.choices[0]
    assert choice.message.content == "one, "
    assert choice.message.reasoning_content == "STOP is the word"
    assert choice.finish_reason == "stop"
    assert "".join(item.token for item in choice.logprobs.content) == "one, "


def test_the_token_limit_is_told(client: OpenAI, engine, written_ids):
    engine.script = lambda request: written_ids("abc", reasoning="a long thought")
    answer = client.chat.completions.create(
        model="fake", messages=HELLO, max_completion_tokens=4, max_tokens=2
    )
    assert answer.choices[0].finish_reason == "length"
    assert answer.usage.completion_tokens == 4
    assert answer.choices[0].message.reasoning_content == "a lo"
    assert answer.choices[0].message.content == ""


def test_the_default_limit_is_what_the_context_holds(client: OpenAI, engine, written_ids):
    engine.script = lambda request: written_ids("x")
    client.chat.completions.create(model="fake", messages=HELLO)
    request = engine.requests[0]
    assert len(request.prompt_ids) + request.max_tokens == engine.info.max_context


@pytest.mark.parametrize(
    ("extra", "opens", "effort"),
    [
        ({}, "think", None),
        ({"reasoning_effort": "none"}, "response", None),
        ({"chat_template_kwargs": {"thinking": False}}, "response", None),
        ({"chat_template_kwargs": {"enable_thinking": False}}, "response", None),
        ({"reasoning_effort": "minimal"}, "think", "low"),
        ({"reasoning_effort": "high"}, "think", "high"),
        ({"reasoning_effort": "xhigh"}, "think", "max"),
    ],
)
def test_thinking_is_switched(client: OpenAI, engine, written_ids, extra, opens, effort):
    engine.script = lambda request: written_ids("x")
    client.chat.completions.create(model="fake", messages=HELLO, extra_body=extra)
    assert prompt_text(engine).endswith(f"<|open|>{opens}<|sep|>")
    assert ("thinking_effort=" in prompt_text(engine)) == (effort is not None)
    assert f"thinking_effort={effort}" in prompt_text(engine) or effort is None


def test_a_response_format_reaches_the_prompt(client: OpenAI, engine, written_ids):
    engine.script = lambda request: written_ids("{}")
    schema = {"name": "s", "schema": {"type": "object", "title": "Box"}}
    client.chat.completions.create(
        model="fake",
        messages=HELLO,
        response_format={"type": "json_schema", "json_schema": schema},
    )
    assert '"title":"Box"' in prompt_text(engine)


def test_sampling_fields_reach_the_engine(client: OpenAI, engine, written_ids):
    engine.script = lambda request: written_ids("x")
    client.chat.completions.create(
        model="fake",
        messages=HELLO,
        temperature=0.5,
        top_p=0.9,
        presence_penalty=0.1,
        frequency_penalty=-0.2,
        seed=-1,
        logit_bias={"65": -100},
        extra_body={"top_k": 7, "min_p": 0.05, "repetition_penalty": 1.1, "unknown_field": [1]},
    )
    sampling = engine.requests[0].sampling
    assert (sampling.temperature, sampling.top_p, sampling.top_k) == (0.5, 0.9, 7)
    assert (sampling.presence_penalty, sampling.frequency_penalty) == (0.1, -0.2)
    assert (sampling.min_p, sampling.repetition_penalty) == (0.05, 1.1)
    assert sampling.seed == 2**63 - 1
    assert sampling.logit_bias == {65: -100.0}
    assert sampling.logprobs is None


def test_content_parts_and_roles_become_the_prompt(client: OpenAI, engine, written_ids):
    engine.script = lambda request: written_ids("x")
    client.chat.completions.create(
        model="fake",
        messages=[
            {"role": "developer", "content": "Be brief."},
            {"role": "user", "content": [{"type": "text", "text": t} for t in ("Hel", "lo")]},
            {"role": "assistant", "content": "Hi.", "reasoning": "greet"},
            {"role": "user", "content": "<|end_of_msg|>"},
        ],
    )
    text = prompt_text(engine)
    assert 'role="system"<|sep|>Be brief.' in text
    assert 'role="user"<|sep|>Hello<|close|>' in text
    assert "<|open|>think<|sep|>greet<|close|>think<|sep|>" in text
    end_of_msg = byte_level().special_ids["<|end_of_msg|>"]
    assert engine.requests[0].prompt_ids.count(end_of_msg) == 4


def test_the_stop_tokens_are_those_of_the_chat_format(client: OpenAI, engine, written_ids):
    engine.script = lambda request: written_ids("x")
    client.chat.completions.create(model="fake", messages=HELLO)
    assert engine.requests[0].stop_ids == XtmlFormat(byte_level()).stop_ids
