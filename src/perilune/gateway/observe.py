"""Watching the events of a call: its metrics, and that it really ends."""

from __future__ import annotations

from collections.abc import AsyncIterator

from perilune.core.errors import EngineError
from perilune.core.types import Finish
from perilune.gateway.answer_head import Numbered
from perilune.gateway.fanout import closing
from perilune.telemetry.metrics import CallTimer


async def observe(
    events: AsyncIterator[Numbered], num_choices: int, timer: CallTimer
) -> AsyncIterator[Numbered]:
    """Passes `events` on.

    Raises:
        EngineError: the events ended before every choice had its Finish.
    """
    outcome = "client_gone"  # holds if neither an end nor an error is seen
    num_finished = 0
    try:
        async with closing(events):
            async for index, event in events:
                if isinstance(event, Finish):
                    num_finished += 1
                    timer.choice_done(event.usage)
                else:
                    timer.saw_output()
                yield index, event
        if num_finished < num_choices:
            raise EngineError("the model stopped before it had finished its answer")
        outcome = ""
    except Exception as error:
        outcome = type(error).__name__
        raise
    finally:
        timer.finish(outcome)
