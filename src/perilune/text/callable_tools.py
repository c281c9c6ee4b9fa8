"""The tools of a request that an answer may call, as far as a grammar is concerned."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

from perilune.core.types import ChatRequest
from perilune.text.schema_keywords import refuse


class CallableTool(NamedTuple):
    name: str
    parameters: Mapping[str, Any]
    is_free: bool
    """Only the names of the arguments are held to, and that each is well formed."""
    at: str
    """The field of `parameters`."""


def callable_tools(request: ChatRequest) -> list[CallableTool]:
    """Each name once; with a named function only that one."""
    found: dict[str, CallableTool] = {}
    for at, tools in _lists(request):
        for i, tool in enumerate(tools):
            read = _read(tool, f"{at}[{i}].function", required=request.tool_choice == "required")
            if request.tool_choice_name in (None, read.name):
                found[read.name] = read
    return [*found.values()]


def is_strict(request: ChatRequest) -> bool:
    """Whether a tool asks for its schema to be held to even where no call is required."""
    return any(
        isinstance(function := tool.get("function"), Mapping) and function.get("strict") is True
        for _, tools in _lists(request)
        for tool in tools
    )


def _lists(request: ChatRequest) -> list[tuple[str, tuple[Mapping[str, Any], ...]]]:
    later = [(f"messages[{i}].tools", m.tools) for i, m in enumerate(request.messages) if m.tools]
    return [("tools", request.tools), *later]


def _read(tool: Mapping[str, Any], at: str, *, required: bool) -> CallableTool:
    function = tool.get("function")
    name = function.get("name") if isinstance(function, Mapping) else None
    if not isinstance(function, Mapping) or not isinstance(name, str) or not name:
        refuse(at, "a function with a name is wanted")
    strict = function.get("strict")
    parameters = function.get("parameters")
    if parameters is not None and not isinstance(parameters, Mapping):
        refuse(f"{at}.parameters", "a schema is an object")
    return CallableTool(
        name=name,
        parameters={"type": "object", "properties": {}} if parameters is None else parameters,
        is_free=not (strict is True or (strict is None and required)),
        at=f"{at}.parameters",
    )
