"""Chat format of Kimi K2 and Kimi Linear: turns between `<|im_…|>` tokens, calls by id.

A turn is a role token, a name, `<|im_middle|>`, the body and `<|im_end|>`. No system prompt is
added of its own accord.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

from perilune.core.types import ChatRequest, Grammar, Message, TextPart, ToolCall
from perilune.text import im_names
from perilune.text.chat import (
    TrainingIds,
    check_messages,
    compact_json,
    offered_tools,
    training_ids,
)
from perilune.text.im_grammar import im_grammar
from perilune.text.im_parser import ImParser
from perilune.text.tokenizer import Segment, Tokenizer
from perilune.text.xtml_markup import text_segment

_WIRE_ID = re.compile(r"functions\..+:\d+", re.DOTALL)
_ROLE_TOKENS = {"user": im_names.USER, "assistant": im_names.ASSISTANT}


class ImFormat:
    """Messages to ids and a parser for what comes back. Immutable; safe to share."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self.tokenizer = tokenizer
        self.stop_ids = tokenizer.eos_ids | {tokenizer.special_ids[im_names.END]}

    def check(self, request: ChatRequest) -> None:
        """Raises TextError if the request is one that cannot be written."""
        check_messages(request.messages)
        offered_tools(request)

    def encode(self, request: ChatRequest) -> list[int]:
        """Prompt ids, ending where the assistant's text begins. Raises as `check`.

        `thinking`, `thinking_effort`, a required call and a response format change nothing: the
        format has no words for them. `grammar` holds the answer to the last two.
        """
        self.check(request)
        tools = () if request.tool_choice == "none" else offered_tools(request)
        segments = render(request.messages, tools=tools, thoughts=self._thoughts)
        return self.tokenizer.encode_segments([*segments, *_turn_head("assistant", "assistant")])

    def grammar(self, request: ChatRequest) -> Grammar | None:
        """As `ChatFormat.grammar`."""
        return im_grammar(request, self.tokenizer.special_ids)

    def encode_conversation(
        self,
        messages: Sequence[Message],
        *,
        tools: Sequence[Mapping[str, Any]] = (),
        thinking: bool = True,
        thinking_effort: str | None = None,
        first_trained: int = 0,
    ) -> TrainingIds:
        """Ids and loss mask of a finished conversation; see `ChatFormat`."""
        check_messages(messages)
        segments = render(
            messages, tools=tools, thoughts=thinking and self._thoughts, first_trained=first_trained
        )
        return training_ids(self.tokenizer, segments)

    def parser(self, request: ChatRequest) -> ImParser:
        offered = [tool.get("function", {}).get("name") for tool in request.tools]
        return ImParser(self.tokenizer, offered=frozenset(filter(None, offered)))

    @property
    def _thoughts(self) -> bool:
        return self.tokenizer.special_ids.keys() >= {im_names.THINK, im_names.END_THINK}


def render(
    messages: Sequence[Message],
    *,
    tools: Sequence[Mapping[str, Any]] = (),
    thoughts: bool = False,
    first_trained: int = 0,
) -> list[Segment]:
    """The segments of a conversation; reasoning of past turns only with `thoughts`."""
    segments: list[Segment] = []
    if tools:
        declared = compact_json(list(tools), param="tools")
        segments += [*_turn_head("system", "tool_declare"), *text_segment(declared), _end()]
    wire_ids = _wire_ids(messages)
    for i, message in enumerate(messages):
        trained = message.role == "assistant" and i >= first_trained
        segments += _turn_head(message.role, message.name or message.role)
        if message.role == "tool":
            call_id = message.tool_call_id or ""
            segments += text_segment(f"## Return of {wire_ids.get(call_id, call_id)}\n")
        if thoughts and message.reasoning:
            segments.append(Segment(im_names.THINK, True, trained))
            segments += text_segment(message.reasoning, trained=trained)
            segments.append(Segment(im_names.END_THINK, True, trained))
        for part in message.content:
            if isinstance(part, TextPart):
                segments += text_segment(part.text, trained=trained)
        segments += _calls(message.tool_calls, wire_ids, trained=trained)
        segments.append(_end(trained=trained))
    return segments


def _turn_head(role: str, name: str) -> list[Segment]:
    token = _ROLE_TOKENS.get(role, im_names.SYSTEM)
    return [Segment(token, True), *text_segment(name), Segment(im_names.MIDDLE, True)]


def _end(*, trained: bool = False) -> Segment:
    return Segment(im_names.END, True, trained)


def _calls(
    calls: Sequence[ToolCall], wire_ids: Mapping[str, str], *, trained: bool
) -> list[Segment]:
    if not calls:
        return []
    segments = [Segment(im_names.CALLS_BEGIN, True, trained)]
    for call in calls:
        segments.append(Segment(im_names.CALL_BEGIN, True, trained))
        segments += text_segment(wire_ids[call.id], trained=trained)
        segments.append(Segment(im_names.ARGUMENTS_BEGIN, True, trained))
        segments += text_segment(call.arguments.strip() or "{}", trained=trained)
        segments.append(Segment(im_names.CALL_END, True, trained))
    return [*segments, Segment(im_names.CALLS_END, True, trained)]


def _wire_ids(messages: Sequence[Message]) -> dict[str, str]:
    """The form of call id that the model knows: `functions.NAME:N`, N over the conversation."""
    calls = [call for message in messages for call in message.tool_calls]
    return {
        call.id: call.id if _WIRE_ID.fullmatch(call.id) else f"functions.{call.name}:{i}"
        for i, call in enumerate(calls)
    }
