"""Short constructors for synthetic conversations."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from perilune.core.types import Message, ResponseFormat, TextPart, ToolCall


class Chat(NamedTuple):
    """Turns that end with the assistant, and the request options they need."""

    messages: tuple[Message, ...]
    tools: tuple[Mapping[str, Any], ...] = ()
    response_format: ResponseFormat = ResponseFormat()


Draw = Callable[[random.Random], Chat]


def user(text: str) -> Message:
    return Message(role="user", content=(TextPart(text=text),))


def assistant(
    text: str, *, reasoning: str | None = None, calls: tuple[ToolCall, ...] = ()
) -> Message:
    content = (TextPart(text=text),) if text else ()
    return Message(role="assistant", content=content, reasoning=reasoning, tool_calls=calls)


def tool_result(text: str, call_id: str) -> Message:
    return Message(role="tool", content=(TextPart(text=text),), tool_call_id=call_id)


def exchange(question: str, answer: str, *, reasoning: str | None = None) -> Chat:
    """One question and its answer."""
    return Chat((user(question), assistant(answer, reasoning=reasoning)))
