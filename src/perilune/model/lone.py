"""A sequence with pools of its own: for scripts, warm-up and measurements. Engines share pools.

Legend: T tokens, R rows of logits, V vocabulary.
"""

from __future__ import annotations

from torch import Tensor

from perilune.model.model import Transformer
from perilune.model.pools import Pools
from perilune.model.step import PAGE, SCRATCH_PAGE, Decoding, Prefilling, Step


class LoneSequence:
    """Freed by dropping the last reference."""

    def __init__(self, model: Transformer, capacity: int = PAGE) -> None:
        """Room for latents of `capacity` tokens, doubled whenever it is full."""
        self._model = model
        self.length = 0
        """Tokens seen."""
        self.pools = self._new_pools(capacity)

    def prefill(self, ids_T: Tensor, num_logits: int = 1) -> Tensor:
        """Feeds T tokens; fp32 logits [R, V] of the last `num_logits`."""
        count = ids_T.shape[0]
        self._reserve(count)
        chunk = Prefilling(0, self._pages, self.length, count, (), num_logits)
        return self._run(ids_T, self.pools.step([], [chunk]))

    def decode(self, ids_T: Tensor) -> Tensor:
        """Feeds T tokens one after another through the recurrent form; fp32 logits [T, V]."""
        count = ids_T.shape[0]
        self._reserve(count)
        fed = Decoding(0, self._pages, self.length + count)
        return self._run(ids_T, self.pools.step([fed], num_each=count))

    def _run(self, ids_T: Tensor, step: Step) -> Tensor:
        logits_RV = self._model.step(ids_T, self.pools, step)
        self.length += ids_T.shape[0]
        return logits_RV

    @property
    def _pages(self) -> range:
        return range(SCRATCH_PAGE + 1, self.pools.limits.num_pages)

    def _reserve(self, count: int) -> None:
        needed, held = self.length + count, len(self._pages) * PAGE
        if needed <= held:
            return
        grown = self._new_pools(max(needed, 2 * held))
        grown.state_LSHKV.copy_(self.pools.state_LSHKV)
        grown.window_LSWC.copy_(self.pools.window_LSWC)
        grown.rows_LPBC[:, : self.pools.limits.num_pages] = self.pools.rows_LPBC
        self.pools = grown

    def _new_pools(self, capacity: int) -> Pools:
        weight = self._model.head_weight
        return Pools.of(
            self._model.share,
            slots=1,
            pages=SCRATCH_PAGE + 1 + -(-capacity // PAGE),
            device=weight.device,
            dtype=weight.dtype,
        )
