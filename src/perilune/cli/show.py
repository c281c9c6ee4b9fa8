"""An answer on the terminal, as it comes."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import TextIO

from perilune.core.types import (
    ChatEvent,
    Message,
    ReasoningDelta,
    TextDelta,
    TextPart,
)
from perilune.gateway.fanout import closing

DIM, PLAIN = "\x1b[2m", "\x1b[0m"


async def show(events: AsyncIterator[ChatEvent], out: TextIO) -> Message:
    """Writes the answer to `out` and returns it. Reasoning is shown, dimmed, on a terminal only."""
    is_terminal = out.isatty()
    text: list[str] = []
    reasoning: list[str] = []
    async with closing(events):
        async for event in events:
            if isinstance(event, ReasoningDelta):
                reasoning.append(event.text)
                if is_terminal:
                    out.write(f"{DIM}{event.text}{PLAIN}")
            elif isinstance(event, TextDelta):
                if is_terminal and reasoning and not text:
                    out.write("\n")
                text.append(event.text)
                out.write(event.text)
            out.flush()
    out.write("\n")
    out.flush()
    return Message(
        role="assistant",
        content=(TextPart(text="".join(text)),) if text else (),
        reasoning="".join(reasoning) or None,
    )
