"""Drafts by a small model of the same vocabulary.

It has pools of its own: a page for every page of the engine's, and two slots a sequence, one with
the state after what is known of it, one to run ahead from there. A state has no way back, so what
runs ahead is a copy, made anew for every draft. Latents need none: rows behind the known tokens are
written over.

Legend: N sequences, V vocabulary.
"""

from __future__ import annotations

from array import array
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from perilune.engine.pages import PagePool
from perilune.engine.sequence import TokenSequence
from perilune.engine.slots import SlotPool
from perilune.engine.step_model import StepModel
from perilune.model.step import Decoding, Prefilling

CATCH_UP = 512
"""Known tokens that the model reads between two steps, of all sequences: they wait for it."""


@dataclass(slots=True, eq=False)
class _Held:
    state: int
    ahead: int
    """Slots."""
    pages: array[int] = field(default_factory=lambda: array("i"))
    num_seen: int = 0
    """Known tokens that the slot `state` has seen."""


class DraftModel:
    """A `Drafter`: the most likely tokens, one after another."""

    def __init__(
        self, model: StepModel, *, pages: int, sequences: int, device: torch.device | str = "cpu"
    ) -> None:
        """`pages` in all, page 0 included, for at most so many sequences at a time."""
        self.pages = PagePool(pages)
        self.slots = SlotPool(2 * sequences)
        self._model = model
        self._pools = model.new_pools(slots=2 * sequences, pages=pages)
        self._device = torch.device(device)
        self._held: dict[TokenSequence, _Held] = {}

    @torch.inference_mode()
    def draft(self, wanted: Mapping[TokenSequence, int]) -> dict[TokenSequence, list[int]]:
        """Nothing for a sequence that there is no memory for, or whose text is not read yet."""
        able = {s: count for s, count in wanted.items() if self._reserve(s, s.num_tokens + count)}
        ready = self._catch_up([*able])
        drafts = {s: [token] for s, token in ready.items()}
        slots = [(self._held[s].state, self._held[s].ahead) for s in drafts]
        self._pools.copy_slots(slots)
        for length in range(1, max(able.values(), default=0)):
            longer = [s for s in drafts if able[s] > length]
            if not longer:
                break
            for sequence, token in self._run_ahead(longer, drafts).items():
                drafts[sequence].append(token)
        return drafts

    def forget(self, sequence: TokenSequence) -> None:
        held = self._held.pop(sequence, None)
        if held is not None:
            self.pages.release(held.pages)
            self.slots.release([held.state, held.ahead])

    def _reserve(self, sequence: TokenSequence, num_tokens: int) -> bool:
        held = self._held.get(sequence)
        missing = -(-num_tokens // self._model.page_len) - (len(held.pages) if held else 0)
        if missing > self.pages.num_free or (held is None and self.slots.num_free < 2):
            return False
        if held is None:
            state, ahead = self.slots.allocate(2)
            held = self._held[sequence] = _Held(state, ahead)
        if missing > 0:
            held.pages.extend(self.pages.allocate(missing))
        return True

    def _catch_up(self, sequences: Sequence[TokenSequence]) -> dict[TokenSequence, int]:
        """Reads on in each, the one with the least left first; the next token of those that are
        read to their end."""
        left, ids, chunks, ends = CATCH_UP, [], [], []
        for s in sorted(sequences, key=lambda s: s.num_tokens - self._held[s].num_seen):
            held = self._held[s]
            count = min(s.num_tokens - held.num_seen, left)
            if count == 0:
                continue
            left -= count
            is_end = held.num_seen + count == s.num_tokens
            ids += s.ids(held.num_seen + count)[held.num_seen :].tolist()
            chunks.append(Prefilling(held.state, held.pages, held.num_seen, count, (), int(is_end)))
            held.num_seen += count
            if is_end:
                ends.append(s)
        if not chunks:
            return {}
        logits_NV = self._model.step(
            self._on_device(ids), self._pools, self._pools.step([], chunks)
        )
        return dict(zip(ends, logits_NV.argmax(dim=-1).tolist(), strict=True))

    def _run_ahead(
        self, sequences: Sequence[TokenSequence], drafts: Mapping[TokenSequence, list[int]]
    ) -> dict[TokenSequence, int]:
        """Feeds the last token of each draft."""
        fed = [
            Decoding(self._held[s].ahead, self._held[s].pages, s.num_tokens + len(drafts[s]))
            for s in sequences
        ]
        ids = self._on_device([drafts[s][-1] for s in sequences])
        logits_NV = self._model.step(ids, self._pools, self._pools.step(fed))
        return dict(zip(sequences, logits_NV.argmax(dim=-1).tolist(), strict=True))

    def _on_device(self, ids: list[int]) -> Tensor:
        return torch.tensor(ids, device=self._device)
