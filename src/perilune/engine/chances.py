"""How likely a kept state is to be hit, by why it was kept, as counted so far.

Where prompts are taken up again depends on the template and on the clients: at a prompt's end, at
the end of its last message, in the middle of a document. Counting finds out, and eviction then
gives up first what nobody comes back to.
"""

from __future__ import annotations

from typing import Literal

Reason = Literal["end", "answer", "abort", "mark", "branch", "aligned", "interval"]
"""The end of a prompt or of an answer; where a request was given up; where its author expects that
others go on; a second sighting; the last multiple of a grid before the prompt's end; a multiple of
the interval."""


class Chances:
    """A state is of its reason's class until it is hit, then of those hit once, then of the rest:
    most conversations go on from where they were, and leave the state before behind."""

    def __init__(self) -> None:
        self._kept: dict[str, int] = {}
        self._hit: dict[str, int] = {}

    def note_kept(self, reason: Reason) -> None:
        self._kept[reason] = self._kept.get(reason, 0) + 1

    def note_hit(self, reason: Reason, num_hits: int) -> None:
        """Of a state that was hit `num_hits` times before."""
        left, entered = _class(reason, num_hits), _class(reason, num_hits + 1)
        self._hit[left] = self._hit.get(left, 0) + 1
        self._kept[entered] = self._kept.get(entered, 0) + 1

    def of(self, reason: Reason, num_hits: int) -> float:
        """Between 0 and 1; a quarter while nothing has been counted."""
        kind = _class(reason, num_hits)
        return (self._hit.get(kind, 0) + 1) / (self._kept.get(kind, 0) + 4)


def _class(reason: Reason, num_hits: int) -> str:
    return reason if num_hits == 0 else "once" if num_hits == 1 else "often"
