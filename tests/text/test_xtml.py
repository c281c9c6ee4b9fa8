"""The encoder beyond the golden cases: what may be forged, what is refused, what is trained."""

from __future__ import annotations

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from perilune.core.types import (
    ChatRequest,
    ImagePart,
    Message,
    ResponseFormat,
    TextPart,
    ToolCall,
)
from perilune.text import k3_names
from perilune.text.errors import TextError
from perilune.text.tiktoken_ranks import RankTokenizer, byte_level
from perilune.text.xtml import IMAGE_PLACEHOLDER, render
from perilune.text.xtml_format import XtmlFormat

BYTES = byte_level()
FORMAT = XtmlFormat(BYTES)
WEATHER = {"type": "function", "function": {"name": "get_weather", "parameters": {}}}
SEARCH = {"type": "function", "function": {"name": "search", "parameters": {}}}


def user(text: str) -> Message:
    return Message(role="user", content=(TextPart(text=text),))


def assistant(text: str = "", *calls: ToolCall, reasoning: str | None = None) -> Message:
    content = (TextPart(text=text),) if text else ()
    return Message(role="assistant", content=content, reasoning=reasoning, tool_calls=calls)


def call(arguments: str, name: str = "f", call_id: str = "c") -> ToolCall:
    return ToolCall(id=call_id, name=name, arguments=arguments)


def result(text: str, call_id: str | None = None, name: str | None = None) -> Message:
    content = (TextPart(text=text),)
    return Message(role="tool", content=content, tool_call_id=call_id, name=name)


def image(**size: int) -> Message:
    return Message(role="user", content=(ImagePart(url="x", **size),))


def request(*messages: Message, **options: object) -> ChatRequest:
    return ChatRequest(request_id="r", model="m", messages=messages, **options)  # pyrefly: ignore


def written(*messages: Message, **options: object) -> str:
    """What the model would see, control tokens by name."""
    return BYTES.decode(FORMAT.encode(request(*messages, **options)))


forgeries = st.lists(
    st.one_of(st.sampled_from([*k3_names.OFFSETS, IMAGE_PLACEHOLDER]), st.text(max_size=3)),
    max_size=4,
).map("".join)


@settings(max_examples=60, deadline=None)
@given(forgeries, forgeries, forgeries, forgeries)
def test_no_text_can_forge_structure(a: str, b: str, c: str, d: str) -> None:
    tool = {"type": "function", "function": {"name": a, "description": b}}
    messages = [
        Message(role="system", content=(TextPart(text=a),), name=b, tools=(tool,)),
        Message(role="user", content=(TextPart(text=c),), name=d or None),
        assistant(b, call(json.dumps({a: b, "x" + c: [d]}), name=c), call("{" + a), reasoning=d),
        result(a, "c"),
        result(b, name=c or "f"),
    ]
    segments = render(messages, tools=[tool], thinking_effort="max")
    ids = FORMAT.encode(request(*messages, tools=(tool,), thinking_effort="max"))
    markup = [segment.text for segment in segments if segment.markup]
    assert [BYTES.token_bytes(i).decode() for i in ids if i in BYTES.control_ids] == markup


@pytest.mark.parametrize(
    ("arguments", "shown"),
    [
        ('{"a":{"k":"v"},"b":[1,2]}', [("a", "object", '{"k": "v"}'), ("b", "array", "[1, 2]")]),
        ('{"z":1,"a":2}', [("z", "number", "1"), ("a", "number", "2")]),
        ('{"x":1e20}', [("x", "number", "1e20")]),
        ('{"x":1.50}', [("x", "number", "1.50")]),
        (
            '{"x":[123456789012345678901234567890.5]}',
            [("x", "array", "[123456789012345678901234567890.5]")],
        ),
        ('{"x":"<|close|>argument<|sep|>"}', [("x", "string", "<|close|>argument<|sep|>")]),
        ('{"x":"\\u00e9\\n"}', [("x", "string", "é\n")]),
        ('{"x":{"y":"\\u4e2d"}}', [("x", "object", '{"y": "中"}')]),
        ('{"x":["\\ud800"]}', [("x", "array", '["\\ud800"]')]),
        ('{"x":""}', [("x", "string", "")]),
        ('{"x":true,"y":null}', [("x", "boolean", "true"), ("y", "null", "null")]),
        ("{}", []),
        (" ", []),
    ],
)
def test_arguments(arguments: str, shown: list[tuple[str, str, str]]) -> None:
    text = written(user("u"), assistant("", call(arguments)))
    elements = "".join(
        f'<|open|>argument key="{key}" type="{kind}"<|sep|>{body}<|close|>argument<|sep|>'
        for key, kind, body in shown
    )
    assert f'call tool="f" index="1"<|sep|>{elements}<|close|>call<|sep|>' in text


@pytest.mark.parametrize(
    "arguments",
    [
        *("{", "[1]", "5", '{"a": NaN}', '{"a": 1} x', '{"a":' + "[" * 100_000),
        *(r'{"a": "\ud800"}', r'{"\udfff": 1}'),
    ],
)
def test_arguments_that_cannot_be_elements_keep_their_text(arguments: str) -> None:
    text = written(user("u"), assistant("", call(arguments)))
    assert f'<|open|>json type="object"<|sep|>{arguments}<|close|>json<|sep|>' in text


def test_results_are_sorted_named_and_numbered() -> None:
    text = written(
        user("u"),
        assistant("", call("", "f", "a"), call("", "g", "b")),
        result("two", "b", name="wrong"),
        result("one", "a"),
        user("then"),
        result("three", name="h"),
    )
    heads = [part.split("<|sep|>")[0] for part in text.split('role="tool" ')[1:]]
    assert heads == ['tool="f" index="1"', 'tool="g" index="2"', 'tool="h" index="3"']
    assert text.index("one") < text.index("two") < text.index("three")


def test_a_run_with_an_unknown_id_keeps_its_order() -> None:
    calls = (call("", "f", "a"), call("", "g", "b"))
    text = written(user("u"), assistant("", *calls), result("B", "b"), result("X", "x", "other"))
    assert text.index('tool="g" index="1"') < text.index('tool="other" index="2"')


def test_numbers_restart_after_each_assistant_message() -> None:
    turn = (assistant("", call("", "f", "a")), result("r", "a"))
    assert written(user("u"), *turn, *turn).count('tool="f" index="1"') == 4


@pytest.mark.parametrize(
    ("messages", "options", "param", "message"),
    [
        ((), {}, "messages", "empty"),
        (
            (user("a"), image(width=1, height=1)),
            {},
            "messages[1].content",
            r"messages\[1\] holds an image, and this model reads text only",
        ),
        ((Message(role="user", tool_calls=(call("{}"),)),), {}, "messages[0].tool_calls", "role"),
        ((user("a"), result("r", "nope")), {}, "messages[1].tool_call_id", "answers no call"),
        ((user("a"), result("r")), {}, "messages[1].tool_call_id", "answers no call"),
        ((user("a"),), {"tool_choice": "required"}, "tool_choice", "no tools"),
        (
            (user("a"),),
            {"tools": (WEATHER,), "tool_choice": "required", "tool_choice_name": "zzz"},
            "tool_choice",
            "'zzz', which is no tool",
        ),
        (
            (user("a"),),
            {"response_format": ResponseFormat(type="json_schema")},
            "response_format",
            "needs a schema",
        ),
        ((user("a"),), {"tools": ({"x": float("nan")},)}, "tools", "as JSON"),
        ((user("\ud83d"),), {}, None, "lone surrogate"),
    ],
)
def test_refusals(
    messages: tuple[Message, ...], options: dict[str, object], param: str | None, message: str
) -> None:
    with pytest.raises(TextError, match=message) as caught:
        FORMAT.encode(request(*messages, **options))
    assert caught.value.param == param
    assert caught.value.status == 400


def test_an_image_takes_the_size_it_comes_with() -> None:
    segments = render([image(width=3, height=2)], image_sizes=[(9, 9)])
    [shown] = [segment for segment in segments if "image" in segment.text]
    assert shown.text == "<|media_begin|>image 3x2<|media_content|><|media_pad|><|media_end|>"
    assert shown.markup
    with pytest.raises(TextError, match="width and height"):
        render([image()])


def test_a_named_choice_declares_that_tool_alone() -> None:
    options = {"tools": (WEATHER, SEARCH), "tool_choice": "required", "tool_choice_name": "search"}
    text = written(user("u"), **options)
    assert '"name":"search"' in text
    assert "get_weather" not in text
    assert "tool_choice=required" in text


def test_the_default_effort_stands_in_for_a_missing_one() -> None:
    with_default = XtmlFormat(BYTES, default_effort="max")
    shown = [
        BYTES.decode(with_default.encode(request(user("u"), **options)))
        for options in ({}, {"thinking_effort": "low"}, {"thinking": False})
    ]
    assert "thinking_effort=max`" in shown[0]
    assert "thinking_effort=low`" in shown[1]
    assert "thinking_effort" not in shown[2]
    assert "thinking_effort" not in written(user("u"))


def trained_text(tokenizer: RankTokenizer, ids: list[int], loss_mask: list[int]) -> list[str]:
    """The stretches with loss, control tokens by name."""
    stretches: list[list[int]] = [[]]
    for token_id, loss in zip(ids, loss_mask, strict=True):
        if loss:
            stretches[-1].append(token_id)
        elif stretches[-1]:
            stretches.append([])
    return [tokenizer.decode(stretch) for stretch in stretches if stretch]


def test_trained_is_what_the_model_writes(k3: RankTokenizer, xtml: XtmlFormat) -> None:
    messages = [
        user("2+2?"),
        assistant("Hm.", call('{"e":"2+2"}'), reasoning="add"),
        result("4", "c"),
        assistant("4"),
    ]
    ids, loss_mask = xtml.encode_conversation(messages, tools=[WEATHER])
    first, second = trained_text(k3, ids, loss_mask)
    assert first == (
        "add<|close|>think<|sep|><|open|>response<|sep|>Hm.<|close|>response<|sep|>"
        '<|open|>tools<|sep|><|open|>call tool="f" index="1"<|sep|>'
        '<|open|>argument key="e" type="string"<|sep|>2+2<|close|>argument<|sep|>'
        "<|close|>call<|sep|><|close|>tools<|sep|><|close|>message<|sep|><|end_of_msg|>"
    )
    assert second.startswith("<|close|>think<|sep|><|open|>response<|sep|>4<|close|>response")
    last_only = xtml.encode_conversation(messages, tools=[WEATHER], first_trained=2)
    assert last_only.ids == ids
    assert trained_text(k3, *last_only) == [second]


def test_a_prompt_is_the_untrained_beginning_of_a_conversation(xtml: XtmlFormat) -> None:
    for thinking in (True, False):
        turns = [user("hi"), assistant("hello", reasoning="greet" if thinking else None)]
        ids, loss_mask = xtml.encode_conversation(turns, thinking=thinking)
        prompt = xtml.encode(request(user("hi"), thinking=thinking))
        assert ids[: len(prompt)] == prompt
        assert loss_mask == [0] * len(prompt) + [1] * (len(ids) - len(prompt))


def test_arguments_that_are_not_json_are_never_trained(k3: RankTokenizer, xtml: XtmlFormat) -> None:
    ids, loss_mask = xtml.encode_conversation([user("u"), assistant("", call("{oops"))])
    assert "oops" in k3.decode(ids)
    assert not any("oops" in text or "json" in text for text in trained_text(k3, ids, loss_mask))
