"""Tool results in a conversation: put into call order, named and numbered.

Consecutive results are sorted into the order of the calls that they answer; a run that holds a
result without a known call keeps its order. Numbers count from 1 after each assistant message.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import groupby
from typing import NamedTuple

from perilune.core.types import Message, ToolCall
from perilune.text.errors import TextError


class Turn(NamedTuple):
    """A message in the place where it is written."""

    message: Message
    position: int
    """Where the caller put it."""
    tool_name: str | None = None
    index: int | None = None
    """From 1; set for a tool result, as is `tool_name`."""


def arrange(messages: Sequence[Message]) -> Iterator[Turn]:
    """The messages in the order in which they are written.

    Raises:
        TextError: the tool of a result cannot be told.
    """
    calls: tuple[ToolCall, ...] = ()
    num_results = 0
    numbered = enumerate(messages)
    for is_result, run in groupby(numbered, key=lambda item: item[1].role == "tool"):
        if is_result:
            for position, result in _in_call_order(list(run), calls):
                num_results += 1
                name = _tool_name(result, position, num_results, calls)
                yield Turn(result, position, name, num_results)
            continue
        for position, message in run:
            if message.role == "assistant":
                calls, num_results = message.tool_calls, 0
            yield Turn(message, position)


def _in_call_order(
    run: list[tuple[int, Message]], calls: Sequence[ToolCall]
) -> list[tuple[int, Message]]:
    order = {call.id: place for place, call in enumerate(calls)}
    places = [order.get(result.tool_call_id or "") for _, result in run]
    if any(place is None for place in places):
        return run
    return [run[i] for i in sorted(range(len(run)), key=lambda i: places[i] or 0)]


def _tool_name(result: Message, position: int, index: int, calls: Sequence[ToolCall]) -> str:
    """The matched call's name, else the result's own, else that of the call at its number."""
    for call in calls:
        if call.id == result.tool_call_id:
            return call.name
    if result.name:
        return result.name
    if result.tool_call_id is None and index <= len(calls):
        return calls[index - 1].name
    raise TextError(
        f"messages[{position}] is a tool result that answers no call: "
        f"tool_call_id is {result.tool_call_id!r}",
        param=f"messages[{position}].tool_call_id",
    )
