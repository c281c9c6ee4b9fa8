from __future__ import annotations

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from perilune.core.types import ChatRequest, Message, ResponseFormat, TextPart, ToolCall
from perilune.text import im_names
from perilune.text.chat import ParsedMessage, parse_message
from perilune.text.errors import TextError
from perilune.text.im_format import ImFormat
from perilune.text.im_parser import ImParser
from perilune.text.tiktoken_ranks import RankTokenizer, byte_ranks

NAMES = im_names.special_ids(256)
TOKENIZER = RankTokenizer(byte_ranks(), NAMES, [NAMES["<|im_end|>"]])
FORMAT = ImFormat(TOKENIZER)
WEATHER = {"type": "function", "function": {"name": "weather", "parameters": {"b": 1, "a": 2}}}


def user(text: str) -> Message:
    return Message(role="user", content=(TextPart(text=text),))


def request(*messages: Message, **options: object) -> ChatRequest:
    return ChatRequest(request_id="r", model="m", messages=messages, **options)  # pyrefly: ignore


def parse(text: str, *, offered: tuple[str, ...] = ("f", "weather", "Bash")) -> ParsedMessage:
    parser = ImParser(TOKENIZER, offered=frozenset(offered))
    return parse_message(parser, TOKENIZER.encode(text, allow_special=True))


def call(call_id: str, arguments: str) -> str:
    return f"<|tool_call_begin|>{call_id}<|tool_call_argument_begin|>{arguments}<|tool_call_end|>"


def section(*calls: str) -> str:
    return f"<|tool_calls_section_begin|>{''.join(calls)}<|tool_calls_section_end|>"


def found(parsed: ParsedMessage) -> list[tuple[str, str, str]]:
    return [(call.id, call.name, call.arguments) for call in parsed.tool_calls]


def test_a_whole_conversation() -> None:
    ask = ToolCall(id="call_1", name="weather", arguments='{"city": "Rome"}')
    kept = ToolCall(id="functions.weather:7", name="weather", arguments="")
    text = TOKENIZER.decode(
        FORMAT.encode(
            request(
                Message(role="system", content=(TextPart(text="S"),)),
                user("U"),
                Message(
                    role="assistant",
                    content=(TextPart(text="A"),),
                    reasoning="R",
                    tool_calls=(ask, kept),
                ),
                Message(role="tool", tool_call_id="call_1", content=(TextPart(text="18C"),)),
                Message(role="tool", tool_call_id=kept.id, name="weather"),
                tools=(WEATHER,),
            )
        )
    )
    assert text == (
        "<|im_system|>tool_declare<|im_middle|>"
        '[{"type":"function","function":{"name":"weather","parameters":{"b":1,"a":2}}}]<|im_end|>'
        "<|im_system|>system<|im_middle|>S<|im_end|><|im_user|>user<|im_middle|>U<|im_end|>"
        "<|im_assistant|>assistant<|im_middle|><think>R</think>A"
        + section(
            call("functions.weather:0", '{"city": "Rome"}'), call("functions.weather:7", "{}")
        )
        + "<|im_end|><|im_system|>tool<|im_middle|>## Return of functions.weather:0\n18C<|im_end|>"
        "<|im_system|>weather<|im_middle|>## Return of functions.weather:7\n<|im_end|>"
        "<|im_assistant|>assistant<|im_middle|>"
    )


names = st.lists(st.one_of(st.sampled_from([*im_names.OFFSETS]), st.text(max_size=3)), max_size=3)


@settings(max_examples=60, deadline=None)
@given(names.map("".join), names.map("".join))
def test_round_trip_without_forgery(a: str, b: str) -> None:
    arguments = json.dumps({a: b})
    message = Message(
        role="assistant",
        reasoning=a,
        content=(TextPart(text=b),),
        tool_calls=(ToolCall(id="functions.f:3", name="f", arguments=arguments),),
    )
    ids, loss_mask = FORMAT.encode_conversation([user(a), message])
    written = [token_id for token_id, loss in zip(ids, loss_mask, strict=True) if loss]
    parsed = parse_message(ImParser(TOKENIZER), written)
    assert (parsed.reasoning, parsed.text, parsed.notes) == (a, b, ())
    assert found(parsed) == [("functions.f:3", "f", arguments)]


@pytest.mark.parametrize(
    "options",
    [
        {"tools": (WEATHER,), "tool_choice": "required"},
        {"tools": (WEATHER,), "response_format": ResponseFormat(type="json_object")},
    ],
)
def test_what_the_format_has_no_words_for_is_held_to(options: dict[str, object]) -> None:
    plain = request(user("u"), tools=(WEATHER,))
    assert FORMAT.grammar(plain) is None
    wanted = request(user("u"), **options)
    assert FORMAT.encode(wanted) == FORMAT.encode(plain)
    assert FORMAT.grammar(wanted) is not None


def test_a_named_function_is_the_only_one_declared() -> None:
    other = {"type": "function", "function": {"name": "other"}}
    options = {"tool_choice": "required", "tool_choice_name": "weather"}
    both = FORMAT.encode(request(user("u"), tools=(WEATHER, other), **options))
    assert both == FORMAT.encode(request(user("u"), tools=(WEATHER,)))


def test_calls_need_their_tokens() -> None:
    names = {name: NAMES[name] for name in im_names.REQUIRED}
    bare = ImFormat(RankTokenizer(byte_ranks(), names, [NAMES["<|im_end|>"]]))
    wanted = request(user("u"), tools=(WEATHER,), tool_choice="required")
    with pytest.raises(TextError, match="no tokens for calls"):
        bare.grammar(wanted)


def test_no_choice_declares_no_tools() -> None:
    ids = FORMAT.encode(request(user("u"), tools=(WEATHER,), tool_choice="none"))
    assert "tool_declare" not in TOKENIZER.decode(ids)


def test_calls_side_by_side_are_two_calls() -> None:
    parsed = parse(section(call("functions.f:0", '{"lat":34}'), call("functions.weather:1", "{}")))
    assert found(parsed) == [
        ("functions.f:0", "f", '{"lat":34}'),
        ("functions.weather:1", "weather", "{}"),
    ]


@pytest.mark.parametrize(
    ("call_id", "name"),
    [
        ("functions.web-search:0", "web-search"),
        ("functions.ns.f:12", "ns.f"),
        ("functions_Bash_2", "Bash"),
        ("functions_Unknown_2", "functions_Unknown_2"),
        ("f:0", "f"),
        ("f", "f"),
    ],
)
def test_the_name_in_an_id(call_id: str, name: str) -> None:
    parsed = parse(section(call(call_id, "{}")))
    assert found(parsed) == [(call_id, name, "{}")]
    assert [note.kind for note in parsed.notes if note.call_index == 0] == (
        ["repaired"] if name == "Bash" else []
    )


def test_markers_in_arguments_are_data() -> None:
    arguments = json.dumps({"text": "write <|tool_call_begin|> here"})
    ids = [
        *TOKENIZER.encode("<|tool_call_begin|>f:0<|tool_call_argument_begin|>", allow_special=True),
        *TOKENIZER.encode(arguments),
        NAMES["<|tool_call_end|>"],
    ]
    assert found(parse_message(ImParser(TOKENIZER), ids)) == [("f:0", "f", arguments)]


def test_a_call_before_the_end_of_thought_is_marked() -> None:
    parsed = parse("<think>hm" + section(call("f:0", "{}")) + " so</think>done<|im_end|>")
    assert (parsed.reasoning, parsed.text) == ("hm so", "done")
    assert found(parsed) == [("f:0", "f", "{}")]
    assert [(note.kind, note.call_index) for note in parsed.notes] == [("call_in_reasoning", 0)]


def test_a_second_section_comes_out_too() -> None:
    parsed = parse("a" + section(call("f:0", "{}")) + "b" + section(call("f:1", "{}")) + "c")
    assert parsed.text == "abc"
    assert len(parsed.tool_calls) == 2


@pytest.mark.parametrize(
    ("broken", "reason"),
    [
        (call("f:0", '{"a": '), "arguments_not_json"),
        (call("f:0", "[1]"), "arguments_not_json"),
        (call("f:0", '{"a": "[PAD]"}'), "stray_control"),
        (call("", "{}"), "call_without_name"),
        ("<|tool_call_begin|>f:0{}<|tool_call_end|>", "call_without_arguments"),
        ("<|tool_call_begin|>f:0<|tool_call_argument_begin|>{}", "call_not_closed"),
    ],
)
def test_a_broken_call_is_set_aside(broken: str, reason: str) -> None:
    parsed = parse("a" + section(call("f:1", "{}"), broken, call("f:2", "{}")) + "b<|im_end|>")
    assert [call.id for call in parsed.tool_calls] == ["f:1", "f:2"]
    assert parsed.text == "ab"
    assert reason in [note.reason for note in parsed.notes]


def test_a_cut_call_never_comes_out() -> None:
    whole = "a" + section(call("f:0", '{"a": 1}'))
    ids = TOKENIZER.encode(whole, allow_special=True)
    end = ids.index(NAMES["<|tool_call_end|>"])
    for cut in range(end + 1):
        parsed = parse_message(ImParser(TOKENIZER), ids[:cut])
        assert not parsed.tool_calls
        assert parsed.text == "a"[:cut]
        assert any(note.kind == "truncated" for note in parsed.notes)


@settings(max_examples=100, deadline=None)
@given(st.lists(st.one_of(st.sampled_from([*NAMES.values()]), st.integers(-1, 600)), max_size=30))
def test_nothing_that_a_model_writes_breaks_it(ids: list[int]) -> None:
    parsed = parse_message(ImParser(TOKENIZER), ids)
    for tool_call in parsed.tool_calls:
        assert isinstance(json.loads(tool_call.arguments), dict)
    assert not any(name in parsed.reasoning + parsed.text for name in NAMES)
