"""The segments of the released encoder, case by case."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from perilune.core.types import ImagePart, Message, ResponseFormat, TextPart, ToolCall
from perilune.text.xtml import render

GOLDEN = Path(__file__).parents[1] / "golden"
CASES: dict[str, Any] = {
    name: case
    for path in ("k3_chat_xtml.json", "k3_chat_xtml_more.json")
    for name, case in json.loads((GOLDEN / path).read_text()).items()
}


def message(raw: dict[str, Any]) -> Message:
    return Message(
        role=raw["role"],
        content=tuple(parts(raw.get("content") or "")),
        name=raw.get("name") or raw.get("tool"),
        reasoning=raw.get("reasoning_content") or raw.get("reasoning"),
        tool_calls=tuple(tool_call(call) for call in raw.get("tool_calls", ())),
        tool_call_id=raw.get("tool_call_id"),
        tools=tuple(raw.get("tools", ())),
    )


def parts(content: str | list[dict[str, Any]]) -> list[TextPart | ImagePart]:
    if isinstance(content, str):
        return [TextPart(text=content)] if content else []
    return [
        TextPart(text=part["text"]) if part["type"] == "text" else ImagePart(url="x")
        for part in content
    ]


def tool_call(raw: dict[str, Any]) -> ToolCall:
    arguments = raw["function"]["arguments"]
    text = arguments if isinstance(arguments, str) else json.dumps(arguments)
    return ToolCall(id=raw["id"], name=raw["function"]["name"], arguments=text)


def wanted_format(raw: dict[str, Any] | None) -> ResponseFormat:
    if raw is None:
        return ResponseFormat()
    schema = raw.get("json_schema")
    return ResponseFormat(type=raw["type"], schema=schema and schema.get("schema", schema))


def sizes(image_prompts: list[str]) -> list[tuple[int, int]]:
    found = [re.findall(r"image (\d+)x(\d+)", prompt)[0] for prompt in image_prompts]
    return [(int(width), int(height)) for width, height in found]


@pytest.mark.parametrize("name", CASES)
def test_segments_equal_the_released_encoders(name: str) -> None:
    given = CASES[name]["input"]
    segments = render(
        [message(raw) for raw in given["messages"]],
        tools=given.get("tools", ()),
        tool_choice=given.get("tool_choice", "auto"),
        response_format=wanted_format(given.get("response_format")),
        thinking=given.get("thinking", True),
        thinking_effort=given.get("thinking_effort"),
        generation_prompt=given.get("add_generation_prompt", True),
        image_sizes=sizes(given.get("image_prompts", [])),
    )
    assert [[segment.text, segment.markup] for segment in segments] == CASES[name]["segments"]


def test_every_published_case_is_here() -> None:
    assert len(CASES) == 38


def test_an_image_part_with_a_size_needs_no_list() -> None:
    image = ImagePart(url="x", width=640, height=480)
    segments = render([Message(role="user", content=(image, TextPart(text="What is this?")))])
    assert [[s.text, s.markup] for s in segments] == CASES["image_part"]["segments"]
