"""XTML messages that carry options of a request: tools, thinking effort, tool choice, format.

The wording is the wire format's own: a model has learned it, so no byte may differ.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from perilune.core.types import ResponseFormat, ToolChoice
from perilune.text.chat import compact_json
from perilune.text.errors import TextError
from perilune.text.tokenizer import Segment
from perilune.text.xtml_markup import system_message

_TOOLS_HEAD = "# Tools\nHere are the available tools, described in JSONSchema.\n\n"
_NEW_TOOLS_HEAD = (
    "## New Tools Available\n"
    "The system dynamically extends the toolset via lazy-loading.\n"
    "You have access to all existing and extended tools.\n"
    "Here are the specs for the extended tools.\n\n"
)
_EFFORT = (
    "`thinking_effort` guides on how much to think in your thinking channel (not including the "
    "response channel), supported values include `low`, `medium`, `high`, and `max`.\n"
    "Now the system is invoked with `thinking_effort={}`."
)
_TOOL_CHOICE = {
    "required": (
        "The system is invoked with `tool_choice=required`.\n"
        "You MUST call tools in the next message."
    ),
    "none": (
        "The system is invoked with `tool_choice=none`.\n"
        "You MUST NOT call any tools in the next message."
    ),
}
_FORMAT = (
    "The system is invoked with `response_format={}`.\n"
    "Your response must be raw JSON data without markdown code blocks (```json) or any "
    "additional formatting."
)
_SCHEMA = "\nThe JSON data must match the following schema:\n"


def declare_tools(tools: Sequence[Mapping[str, Any]], *, later: bool = False) -> list[Segment]:
    """The tools of a request, or `later` those of a system message in mid-conversation."""
    if not tools:
        return []
    head = _NEW_TOOLS_HEAD if later else _TOOLS_HEAD
    return system_message("tool-declare", head + _fenced(list(tools), "tools"))


def thinking_effort(level: str | None) -> list[Segment]:
    return system_message("thinking-effort", _EFFORT.format(level)) if level else []


def tool_choice(choice: ToolChoice) -> list[Segment]:
    wording = _TOOL_CHOICE.get(choice)
    return system_message("tool-choice", wording) if wording else []


def response_format(wanted: ResponseFormat) -> list[Segment]:
    if wanted.type not in ("json_object", "json_schema"):
        return []  # the wire format has no words for the others
    body = _FORMAT.format(wanted.type)
    if wanted.type == "json_schema":
        if wanted.schema is None:
            raise TextError("response_format json_schema needs a schema", param="response_format")
        body += _SCHEMA + _fenced(wanted.schema, "response_format")
    return system_message("response-format", body)


def _fenced(value: object, param: str) -> str:
    """Compact JSON with keys sorted at every depth, in a fenced block."""
    return f"```json\n{compact_json(value, param=param, sort_keys=True)}\n```"
