"""A model without weights: a row of logits is a function of the whole history, and of it alone.

Legend: T packed tokens, R rows of logits, V vocabulary, N rows of a step that only decodes.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from hashlib import blake2b
from typing import NamedTuple

import torch
from torch import Tensor

from perilune.engine.fake_pools import FakeDecodeStep, FakePools, Fed, check_slots


class FakeVerified(NamedTuple):
    logits_RV: Tensor
    token_ids_T: Tensor


class FakeModel:
    """A `StepModel`. Batching cannot change its logits, so a wrong token is the engine's fault; a
    slot or page of somebody else's raises."""

    def __init__(self, vocab_size: int = 64, page_len: int = 64) -> None:
        self.vocab_size = vocab_size
        self.page_len = page_len
        self.calls: list[tuple[int, ...]] = []
        """The new tokens of each sequence, of every call."""
        self.on_call: Callable[[Sequence[Fed]], None] = lambda step: None
        """Runs before anything is computed; may raise or block."""

    def new_pools(self, *, slots: int, pages: int) -> FakePools:
        return FakePools(slots=slots, pages=pages, page_len=self.page_len)

    def step(
        self, token_ids_T: Tensor, pools: FakePools, step: Sequence[Fed] | FakeDecodeStep
    ) -> Tensor:
        """Rows of logits that are inert are zeros, and no call is noted where all are."""
        if isinstance(step, FakeDecodeStep):
            return self._padded(token_ids_T, pools, step.fed(pools.page_len))
        lengths = tuple(fed.num_new for fed in step)
        assert token_ids_T.shape == (sum(lengths),)
        self.calls.append(lengths)
        self.on_call(step)
        rows = []
        for fed, ids in zip(step, token_ids_T.split(lengths), strict=True):
            seen = pools.feed(fed, ids.tolist())
            ends = range(len(seen) - fed.num_logits + 1, len(seen) + 1)
            rows += [self.logits(seen[:end]) for end in ends]
        return torch.stack(rows) if rows else torch.empty(0, self.vocab_size)

    def verify(
        self, token_ids_T: Tensor, pools: FakePools, step: Sequence[Fed] | FakeDecodeStep
    ) -> FakeVerified:
        if isinstance(step, FakeDecodeStep):
            assert step.keep_N is not None
        else:
            assert any(fed.is_draft for fed in step)
        return FakeVerified(self.step(token_ids_T, pools, step), token_ids_T)

    def accept(
        self,
        verified: FakeVerified,
        pools: FakePools,
        step: Sequence[Fed] | FakeDecodeStep,
        keep_N: Tensor,
    ) -> None:
        if isinstance(step, FakeDecodeStep):
            drafts = step.fed(pools.page_len)
            fed_ids = verified.token_ids_T.split(step.num_each)
        else:
            drafts = [fed for fed in step if fed.is_draft]
            fed_ids = verified.token_ids_T.split([fed.num_new for fed in step])
        for fed, ids, keep in zip(drafts, fed_ids, keep_N.tolist(), strict=False):
            if fed is not None:
                assert 1 <= keep <= fed.num_new
                pools.accept(fed, ids[:keep].tolist())

    def _padded(self, token_ids_T: Tensor, pools: FakePools, fed: list[Fed | None]) -> Tensor:
        ids_NQ = token_ids_T.view(len(fed), -1)
        rows = [i for i, each in enumerate(fed) if each is not None]
        logits_NQV = torch.zeros(*ids_NQ.shape, self.vocab_size)
        real = [each for each in fed if each is not None]
        if real:
            check_slots(real)
            logits_RV = self.step(ids_NQ[rows].flatten(), pools, real)
            logits_NQV[rows] = logits_RV.view(len(rows), -1, self.vocab_size)
        return logits_NQV.flatten(0, 1)

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
