"""A model without weights: a row of logits is a function of the whole history, and of it alone.

Legend: T packed tokens, N sequences, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from hashlib import blake2b

import torch
from torch import Tensor

from perilune.kernels.common.packing import Packing


@dataclass(eq=False)
class FakeCache:
    ids: list[int] = field(default_factory=list)
    """Every token seen, in order."""

    @property
    def length(self) -> int:
        return len(self.ids)

    @property
    def nbytes(self) -> int:
        return 8 * len(self.ids)


class FakeModel:
    """A `StepModel`. Batching cannot change its logits, so a wrong token is the engine's fault."""

    def __init__(self, vocab_size: int = 64) -> None:
        self.vocab_size = vocab_size
        self.calls: list[tuple[int, ...]] = []
        """The lengths of every call."""
        self.on_call: Callable[[Sequence[FakeCache]], None] = lambda caches: None
        """Runs before the caches grow; may raise or block."""

    def new_cache(self) -> FakeCache:
        return FakeCache()

    def __call__(
        self, token_ids_T: Tensor, packing: Packing, caches: Sequence[FakeCache], *, last_only: bool
    ) -> Tensor:
        assert last_only
        assert token_ids_T.shape == (packing.num_tokens,)
        self.calls.append(packing.lengths)
        self.on_call(caches)
        for cache, ids in zip(caches, token_ids_T.split(packing.lengths), strict=True):
            cache.ids += ids.tolist()
        return torch.stack([self.logits(cache.ids) for cache in caches])

    def logits(self, ids: Sequence[int]) -> Tensor:
        """The row [V] that follows `ids`: standard normal, times 3."""
        digest = blake2b(repr(list(ids)).encode(), digest_size=8).digest()
        generator = torch.Generator().manual_seed(int.from_bytes(digest, "big") >> 1)
        return 3 * torch.randn(self.vocab_size, generator=generator)

    def continuation(self, prompt_ids: Sequence[int], count: int) -> list[int]:
        """The next `count` most likely tokens, one after another."""
        ids = list(prompt_ids)
        for _ in range(count):
            ids.append(int(self.logits(ids).argmax()))
        return ids[len(prompt_ids) :]
