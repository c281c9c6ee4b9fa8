"""Properties of encoder and parser together, over generated messages."""

from __future__ import annotations

import json

from hypothesis import given, settings
from hypothesis import strategies as st

from perilune.core.types import Message, TextPart, ToolCall, ToolCallDelta
from perilune.text import k3_names
from perilune.text.chat import ParsedMessage, parse_message
from perilune.text.tiktoken_ranks import byte_level
from perilune.text.xtml_format import XtmlFormat
from perilune.text.xtml_parser import XtmlParser

BYTES = byte_level()
FORMAT = XtmlFormat(BYTES)


def ids_of(text: str) -> list[int]:
    return BYTES.encode(text, allow_special=True)


def calls(parsed: ParsedMessage) -> list[tuple[str, str]]:
    return [(call.name, call.arguments) for call in parsed.tool_calls]


WHOLE_CALL = (
    '<|open|>call tool="f" index="1"<|sep|><|open|>argument key="k" type="number"<|sep|>1'
    "<|close|>argument<|sep|><|close|>call<|sep|>"
)
odd_text = st.lists(
    st.one_of(
        st.sampled_from(
            [*k3_names.OFFSETS, "<|close|>argument<|sep|>", '"', "&quot;", "&amp;", "\\"]
        ),
        st.text(max_size=4),
    ),
    max_size=4,
).map("".join)
json_values = st.recursive(
    st.one_of(
        st.none(),
        st.booleans(),
        st.integers(),
        st.floats(allow_nan=False, allow_infinity=False),
        odd_text,
    ),
    lambda inner: st.one_of(
        st.lists(inner, max_size=3), st.dictionaries(odd_text, inner, max_size=3)
    ),
    max_leaves=6,
)
arguments = st.dictionaries(odd_text, json_values, max_size=4)
tool_calls = st.lists(st.tuples(odd_text.filter(bool), arguments), max_size=3)


def message(reasoning: str, text: str, wanted: list[tuple[str, dict[str, object]]]) -> Message:
    return Message(
        role="assistant",
        reasoning=reasoning,
        content=(TextPart(text=text),),
        tool_calls=tuple(
            ToolCall(id=str(i), name=name, arguments=json.dumps(values, ensure_ascii=False))
            for i, (name, values) in enumerate(wanted)
        ),
    )


def written_by_model(written: Message) -> list[int]:
    ids, loss_mask = FORMAT.encode_conversation([written])
    return [token_id for token_id, loss in zip(ids, loss_mask, strict=True) if loss]


@settings(max_examples=120, deadline=None)
@given(odd_text, odd_text, tool_calls)
def test_round_trip(reasoning: str, text: str, wanted: list[tuple[str, dict[str, object]]]) -> None:
    written = message(reasoning, text, wanted)
    parsed = parse_message(XtmlParser(BYTES), written_by_model(written))
    assert (parsed.reasoning, parsed.text, parsed.notes) == (reasoning, text, ())
    assert calls(parsed) == [(call.name, call.arguments) for call in written.tool_calls]


def check_cut(ids: list[int], end: int, whole: ParsedMessage) -> None:
    cut = parse_message(XtmlParser(BYTES), ids[:end])
    assert whole.reasoning.startswith(cut.reasoning.removesuffix("\ufffd"))
    assert whole.text.startswith(cut.text.removesuffix("\ufffd"))
    call_end = ids_of("<|close|>call<|sep|>")
    closed = sum(ids[i : i + len(call_end)] == call_end for i in range(end - len(call_end) + 1))
    assert calls(cut) == calls(whole)[:closed]
    ended = ids[:end][-9:] == ids_of("<|close|>message<|sep|>")
    assert any(note.kind == "truncated" for note in cut.notes) != ended


@settings(max_examples=60, deadline=None)
@given(odd_text, odd_text, tool_calls, st.lists(st.floats(0, 1, exclude_max=True), max_size=3))
def test_a_cut_keeps_the_text_and_whole_calls_only(
    reasoning: str, text: str, wanted: list[tuple[str, dict[str, object]]], cuts: list[float]
) -> None:
    ids = written_by_model(message(reasoning, text, wanted))
    whole = parse_message(XtmlParser(BYTES), ids)
    for cut in cuts:
        check_cut(ids, int(cut * len(ids)), whole)


def test_a_cut_at_every_byte() -> None:
    wanted: list[tuple[str, dict[str, object]]] = [("f", {"é": "😀", "n": [1, {}]}), ("g", {})]
    ids = written_by_model(message("né", "😀 ok", wanted))
    whole = parse_message(XtmlParser(BYTES), ids)
    assert calls(whole) == [("f", '{"é": "😀", "n": [1, {}]}'), ("g", "{}")]
    for end in range(len(ids)):
        check_cut(ids, end, whole)


@settings(max_examples=200, deadline=None)
@given(
    st.lists(
        st.one_of(
            st.sampled_from(
                ["<|open|>", "<|close|>", "<|sep|>", "<|end_of_msg|>", "[EOS]", "[PAD]"]
            ),
            st.sampled_from(["think", "response", "tools", "message", "call", "argument", "json"]),
            st.sampled_from(
                [' tool="f"', ' key="k" type="string"', ' type="number"', ' x="', "é", "7"]
            ),
            st.just('<|open|>argument key="k" type="string"<|sep|>v<|close|>argument<|sep|>'),
            st.just(WHOLE_CALL),
        ),
        max_size=25,
    ),
    st.booleans(),
)
def test_nothing_that_a_model_writes_breaks_it(pieces: list[str], thinking: bool) -> None:
    ids = ids_of("".join(pieces))
    parser = XtmlParser(BYTES, thinking=thinking)
    deltas = [delta for token_id in [*ids, 300, 5000, -1] for delta in parser.feed(token_id)]
    deltas += parser.finish()
    indexes = [delta.index for delta in deltas if isinstance(delta, ToolCallDelta)]
    assert indexes == list(range(parser.num_calls))
    for delta in deltas:
        if isinstance(delta, ToolCallDelta):
            assert json.loads(delta.arguments).keys() <= {"k"}
        else:
            assert delta.text
            assert not any(name in delta.text for name in BYTES.special_ids)
