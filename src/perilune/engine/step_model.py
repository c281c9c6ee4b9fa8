"""What the engine asks of a model: `perilune.model.model.Transformer` has it, fakes in tests too.

Legend: T packed tokens, N sequences, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

from torch import Tensor

from perilune.kernels.common.packing import Packing


class StepCache(Protocol):
    """The memory of one sequence. It only grows: no token in it can be taken back."""

    length: int
    """Tokens seen."""

    @property
    def nbytes(self) -> int: ...


class StepModel(Protocol):
    def new_cache(self) -> StepCache: ...

    def __call__(
        self, token_ids_T: Tensor, packing: Packing, caches: Sequence[Any], *, last_only: bool
    ) -> Tensor:
        """fp32 logits [N, V] of each sequence's last token; extends the caches in place."""
        ...
