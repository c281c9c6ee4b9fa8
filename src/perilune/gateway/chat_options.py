"""Options of a chat request that have no counterpart of the same shape in core."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Literal, NamedTuple, TypeVar, cast

from perilune.core.types import ResponseFormat, ToolChoice
from perilune.gateway.errors import BodyError
from perilune.gateway.request_types import ChatBody, ToolChoiceBody

F = TypeVar("F")

ThinkingEffort = Literal["low", "medium", "high", "max"]

_EFFORTS: Mapping[str, ThinkingEffort] = {
    "minimal": "low",
    "low": "low",
    "medium": "medium",
    "high": "high",
    "xhigh": "max",
    "max": "max",
}
"""The wire's levels by K3's; "none" switches thinking off."""


class Thinking(NamedTuple):
    on: bool
    effort: ThinkingEffort | None


def to_thinking(wire: ChatBody) -> Thinking:
    options = wire.chat_template_kwargs
    switches = (options.thinking, options.enable_thinking) if options else ()
    on = False not in switches and wire.reasoning_effort != "none"
    return Thinking(on, _EFFORTS.get(wire.reasoning_effort or "") if on else None)


class Choice(NamedTuple):
    mode: ToolChoice
    name: str | None = None


def to_tool_choice(wire: ChatBody, tools: Sequence[Mapping[str, Any]]) -> Choice:
    choice = wire.tool_choice
    if isinstance(choice, ToolChoiceBody):
        name = choice.function.name
        if all(tool["function"]["name"] != name for tool in tools):
            raise BodyError(
                f"tool_choice: {name[:64]!r} is not among `tools`",
                param="tool_choice.function.name",
            )
        return Choice("required", name)
    if choice not in (None, "none", "auto", "required"):
        raise BodyError(
            f"tool_choice: expected none, auto, required or a function, got {choice[:40]!r}",
            param="tool_choice",
        )
    if choice == "required" and not tools:
        raise BodyError("tool_choice: `required` needs `tools`", param="tool_choice")
    return Choice(cast(ToolChoice, choice or "auto"))


def to_response_format(wire: ChatBody) -> ResponseFormat:
    body = wire.response_format
    if body is None:
        return ResponseFormat()
    match body.type:
        case "json_schema":
            schema = _needed(body.json_schema, "json_schema")
            return ResponseFormat(
                type="json_schema", schema=schema.schema, strict=schema.strict is not False
            )
        case "regex":
            return ResponseFormat(type="regex", pattern=_needed(body.pattern, "pattern"))
        case "grammar":
            return ResponseFormat(type="grammar", grammar=_needed(body.grammar, "grammar"))
        case _:
            return ResponseFormat(type=body.type)


def _needed(value: F | None, name: str) -> F:
    if value is None:
        field = f"response_format.{name}"
        raise BodyError(f"{field}: required field is missing", param=field)
    return value


def num_chat_logprobs(wire: ChatBody) -> int | None:
    if wire.top_logprobs and not wire.logprobs:
        raise BodyError("top_logprobs: needs `logprobs` to be true", param="top_logprobs")
    return (wire.top_logprobs or 0) if wire.logprobs else None


def refuse_old_functions(wire: ChatBody) -> None:
    for name, successor in (("functions", "tools"), ("function_call", "tool_choice")):
        if getattr(wire, name) is not None:
            raise BodyError(f"{name}: not supported; use `{successor}`", param=name)
