"""Chat messages of the wire into core messages."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from perilune.core.types import ImagePart, Message, Part, TextPart, ToolCall
from perilune.gateway.json_body import field_error
from perilune.gateway.request_types import (
    AssistantBody,
    Content,
    DeveloperBody,
    MessageBody,
    SystemBody,
    TextPartBody,
    ToolBody,
    ToolDeclaration,
    UserBody,
)


def to_messages(bodies: Sequence[MessageBody]) -> tuple[Message, ...]:
    """The conversation, in order; a developer message becomes a system message."""
    return tuple(_to_message(body, f"messages[{i}]") for i, body in enumerate(bodies))


def check_tools(tools: Sequence[dict[str, Any]] | None, at: str) -> tuple[Mapping[str, Any], ...]:
    """The tool objects as they came, each of them checked.

    Raises:
        BodyError: a tool without a proper function; `at` is the path of the list.
    """
    for index, tool in enumerate(tools or ()):
        try:
            msgspec.convert(tool, ToolDeclaration)
        except msgspec.ValidationError as error:
            raise field_error(error, at=f"{at}[{index}]") from None
    return tuple(tools or ())


def _to_message(body: MessageBody, at: str) -> Message:
    match body:
        case SystemBody():
            return Message(
                role="system",
                content=_to_parts(body.content),
                name=body.name,
                tools=check_tools(body.tools, f"{at}.tools"),
            )
        case DeveloperBody():
            return Message(role="system", content=_to_parts(body.content), name=body.name)
        case UserBody():
            return Message(role="user", content=_to_parts(body.content), name=body.name)
        case AssistantBody():
            return _to_assistant(body)
        case ToolBody():
            return Message(
                role="tool",
                content=_to_parts(body.content),
                name=body.name,
                tool_call_id=body.tool_call_id,
            )


def _to_assistant(body: AssistantBody) -> Message:
    reasoning = body.reasoning if body.reasoning_content is None else body.reasoning_content
    calls = (
        ToolCall(id=call.id, name=call.function.name, arguments=call.function.arguments)
        for call in body.tool_calls or ()
    )
    return Message(
        role="assistant",
        content=_to_parts(body.content),
        name=body.name,
        reasoning=reasoning,
        tool_calls=tuple(calls),
    )


def _to_parts(content: Content | None) -> tuple[Part, ...]:
    if content is None:
        return ()
    if isinstance(content, str):
        return (TextPart(text=content),)
    return tuple(
        TextPart(text=part.text)
        if isinstance(part, TextPartBody)
        else ImagePart(url=part.image_url.url)
        for part in content
    )
