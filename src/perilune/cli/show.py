"""An answer on the terminal, as it comes."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import TextIO

from perilune.core.types import ChatEvent, Message, ReasoningDelta, TextDelta, TextPart
from perilune.gateway.fanout import closing

DIM, PLAIN = "\x1b[2m", "\x1b[0m"


async def show(events: AsyncIterator[ChatEvent], out: TextIO) -> Message:
    """Writes the answer to `out` and returns it. Reasoning is shown, dimmed, on a terminal only."""
    text: list[str] = []
    reasoning: list[str] = []
    screen = _Screen(out)
    try:
        async with closing(events):
            async for event in events:
                if isinstance(event, ReasoningDelta):
                    reasoning.append(event.text)
                    screen.write_reasoning(event.text)
                elif isinstance(event, TextDelta):
                    text.append(event.text)
                    screen.write_text(event.text)
    finally:
        screen.end()
    return Message(
        role="assistant",
        content=(TextPart(text="".join(text)),) if text else (),
        reasoning="".join(reasoning) or None,
    )


class _Screen:
    def __init__(self, out: TextIO) -> None:
        self._out = out
        self._shows_reasoning = out.isatty()
        self._is_dim = False
        self._has_written = False

    def write_reasoning(self, text: str) -> None:
        if self._shows_reasoning:
            self._write(text if self._is_dim else DIM + text)
            self._is_dim = True

    def write_text(self, text: str) -> None:
        self._write(f"{PLAIN}\n{text}" if self._is_dim else text)
        self._is_dim = False

    def end(self) -> None:
        if self._has_written:
            self._write(f"{PLAIN}\n" if self._is_dim else "\n")

    def _write(self, text: str) -> None:
        self._has_written = True
        self._out.write(text)
        self._out.flush()
