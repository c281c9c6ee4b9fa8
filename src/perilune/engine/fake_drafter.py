"""A drafter that knows what a fake model will say, and is wrong where it is told to be."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from perilune.engine.fake_model import FakeModel
from perilune.engine.sequence import TokenSequence


class FakeDrafter:
    """Draws the number of right tokens of every draft, and whether there is one, from `draw`."""

    def __init__(self, model: FakeModel, draw: Callable[[int], int]) -> None:
        """`draw(n)`: a number from 0 to n."""
        self.known: set[TokenSequence] = set()
        """Drafted for and not forgotten yet."""
        self._model = model
        self._draw = draw

    def draft(self, wanted: Mapping[TokenSequence, int]) -> dict[TokenSequence, list[int]]:
        self.known |= wanted.keys()
        return {s: self._of(s, count) for s, count in wanted.items() if self._draw(3)}

    def forget(self, sequence: TokenSequence) -> None:
        self.known.discard(sequence)

    def _of(self, sequence: TokenSequence, count: int) -> list[int]:
        text = [*sequence.request.prompt_ids, *sequence.generated_ids]
        draft = self._model.continuation(text, 1 + self._draw(count - 1))
        num_right = self._draw(len(draft))
        if num_right < len(draft):
            draft[num_right] = (draft[num_right] + 1) % self._model.vocab_size
        return draft
