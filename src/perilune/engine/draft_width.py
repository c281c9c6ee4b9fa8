"""How many tokens are worth drafting for one sequence, by what became of its last drafts."""

from __future__ import annotations

MAX_WIDTH = 7
"""With the token that is fed anyway, eight rows: more of them cost what they gain."""
FIRST_WIDTH = 3
MAX_PAUSE = 32


class DraftWidth:
    """Doubles when a whole draft was right, falls to what was right of it otherwise. After a draft
    that was wrong from the start there is none for some steps, twice as many each time."""

    def __init__(self) -> None:
        self._width = FIRST_WIDTH
        self._pause = 0
        self._left = 0

    @property
    def is_pausing(self) -> bool:
        """The next step will have no draft."""
        return self._left > 0

    def next(self) -> int:
        """For the next step; 0: no draft. Once a step."""
        if self._left > 0:
            self._left -= 1
            return 0
        return self._width

    def note(self, num_drafted: int, num_right: int) -> None:
        """Of a step that had a draft."""
        if num_right == num_drafted:
            self._width = min(max(self._width, 2 * num_drafted), MAX_WIDTH)
        else:
            self._width = max(num_right, 1)
        self._pause = 0 if num_right else min(2 * self._pause + 1, MAX_PAUSE)
        self._left = self._pause
