"""/v1/completions through the official client."""

from __future__ import annotations

import pytest
from openai import OpenAI


def test_text_comes_back(client: OpenAI, engine):
    answer = client.completions.create(model="fake", prompt="Grüße 👋", max_tokens=50)
    assert answer.object == "text_completion"
    assert answer.id.startswith("cmpl-")
    assert answer.choices[0].text == "Grüße 👋"
    assert answer.choices[0].finish_reason == "stop"
    assert answer.usage.prompt_tokens == len("Grüße 👋".encode())
    assert answer.usage.completion_tokens == len("Grüße 👋".encode()) + 1
    assert answer.choices[0].logprobs is None


def test_the_default_limit_is_sixteen_tokens(client: OpenAI, engine):
    answer = client.completions.create(model="fake", prompt="x" * 40)
    assert answer.choices[0].text == "x" * 16
    assert answer.choices[0].finish_reason == "length"


def test_past_the_end_token_when_it_is_ignored(client: OpenAI, engine):
    (end,) = engine.info.eos_ids
    engine.script = lambda request: [*b"ab", end, *b"cdefgh"]
    asked = {"model": "fake", "prompt": "x", "max_tokens": 5}
    assert client.completions.create(**asked).choices[0].text == "ab"
    answer = client.completions.create(**asked, extra_body={"ignore_eos": True})
    assert answer.choices[0].text == "abcd"
    assert answer.choices[0].finish_reason == "length"
    assert answer.usage.completion_tokens == 5


def test_a_stream_joins_to_the_whole_and_never_splits_a_character(client: OpenAI, engine):
    stream = client.completions.create(
        model="fake",
        prompt="é👋é",
        stream=True,
        stream_options={"include_usage": True},
        max_tokens=50,
    )
    *texts, finish, usage = list(stream)
    assert [chunk.choices[0].text for chunk in texts] == ["é", "👋", "é"]
    assert finish.choices[0].finish_reason == "stop"
    assert usage.usage.completion_tokens == len("é👋é".encode()) + 1
    assert all(chunk.usage is None for chunk in texts)


def test_a_character_cut_by_the_limit_becomes_the_replacement_character(client: OpenAI, engine):
    answer = client.completions.create(model="fake", prompt="a👋", max_tokens=3)
    assert answer.choices[0].text == "a�"


@pytest.mark.parametrize("prompt", [[72, 105], [[72, 105]], ["Hi"]])
def test_every_form_of_a_single_prompt(client: OpenAI, engine, prompt):
    answer = client.completions.create(model="fake", prompt=prompt)
    assert answer.choices[0].text == "Hi"
    assert engine.requests[0].prompt_ids == (72, 105)


def test_several_prompts_with_several_choices_are_numbered_prompt_by_prompt(client, engine):
    answer = client.completions.create(model="fake", prompt=["ab", "cde"], n=2, seed=5)
    assert [c.text for c in answer.choices] == ["ab", "ab", "cde", "cde"]
    assert [c.index for c in answer.choices] == [0, 1, 2, 3]
    assert sorted(r.sampling.seed for r in engine.requests) == [5, 5, 6, 6]
    assert answer.usage.prompt_tokens == 5
    assert len({request.request_id for request in engine.requests}) == 1


def test_echo_puts_the_prompt_first(client: OpenAI, engine):
    engine.script = lambda request: b" world"
    answer = client.completions.create(model="fake", prompt="hello", echo=True)
    assert answer.choices[0].text == "hello world"


def test_logprobs_have_the_old_shape(client: OpenAI, engine):
    answer = client.completions.create(model="fake", prompt="abc", logprobs=2)
    logprobs = answer.choices[0].logprobs
    assert logprobs.tokens == ["a", "b", "c"]
    assert logprobs.token_logprobs == [-0.5, -0.5, -0.5]
    assert logprobs.text_offset == [0, 1, 2]
    assert logprobs.top_logprobs[1] == {"b": -0.5, "c": -1.5}


def test_streamed_logprobs_have_running_offsets(client: OpenAI, engine):
    stream = client.completions.create(model="fake", prompt="abc", logprobs=0, stream=True)
    offsets = [o for c in stream if (p := c.choices[0].logprobs) for o in p.text_offset]
    assert offsets == [0, 1, 2]


def test_a_stop_string_ends_the_text_and_the_sequence(client: OpenAI, engine):
    answer = client.completions.create(
        model="fake", prompt="one END two", stop="END", max_tokens=50, logprobs=0
    )
    choice = answer.choices[0]
    assert choice.text == "one "
    assert choice.finish_reason == "stop"
    assert choice.logprobs.tokens == list("one ")
    assert answer.usage.completion_tokens == len("one END")


def test_names_of_control_tokens_in_a_prompt_are_text(client: OpenAI, engine):
    client.completions.create(model="fake", prompt="<|open|>")
    assert engine.requests[0].prompt_ids == tuple(b"<|open|>")
