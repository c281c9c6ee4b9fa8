"""Drafts from a sequence's own text: what followed the last time that its newest tokens came."""

from __future__ import annotations

from collections.abc import Sequence

MATCH = 3
"""Tokens that have to be the same. Two are so by chance all the time; four start later."""
LOOK_BACK = 65_536
"""Newest tokens of a prompt that are looked through: an entry takes some 100 bytes."""


class PromptLookup:
    """An index over the last `LOOK_BACK` tokens of a prompt and all that comes behind."""

    def __init__(self, prompt_ids: Sequence[int]) -> None:
        self._ids: list[int] = []
        self._behind: dict[tuple[int, ...], int] = {}
        """Where the text goes on behind the newest of the same runs of tokens. The run that the
        text ends with is not in it yet: it would only find itself."""
        for token_id in prompt_ids[-LOOK_BACK:]:
            self.append(token_id)
        self._num_of_prompt = len(self._ids)

    @property
    def num_appended(self) -> int:
        """Behind the prompt."""
        return len(self._ids) - self._num_of_prompt

    def append(self, token_id: int) -> None:
        if len(self._ids) >= MATCH:
            self._behind[tuple(self._ids[-MATCH:])] = len(self._ids)
        self._ids.append(token_id)

    def draft(self, count: int) -> list[int]:
        """The next `count` tokens, if all goes on as it did; empty if this was never here.

        A text that repeats itself without end is continued in its own period.
        """
        at = self._behind.get(tuple(self._ids[-MATCH:]))
        if at is None:
            return []
        period = len(self._ids) - at
        return [self._ids[at + i % period] for i in range(count)]
