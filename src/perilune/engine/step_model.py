"""What the engine asks of a model: `perilune.model.model.Transformer` has it, fakes in tests too.

Legend: T packed tokens, R rows of logits, V vocabulary, N sequences that decode, J pages of each.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

from torch import Tensor

from perilune.model.step import Decoding, Prefilling


class StepPools(Protocol):
    """Memory of all sequences, see `perilune.model.pools.Pools`: slots and pages by number."""

    @property
    def slot_nbytes(self) -> int: ...

    @property
    def page_nbytes(self) -> int: ...

    def step(
        self,
        decoding: Sequence[Decoding],
        prefilling: Sequence[Prefilling] = (),
        *,
        num_each: int = 1,
        verify: bool = False,
    ) -> Any:
        """What the model's `step` takes, or its `verify`."""
        ...

    def decode_step(
        self,
        slot_N: Tensor,
        table_NJ: Tensor,
        length_N: Tensor,
        row_T: Tensor,
        keep_N: Tensor | None = None,
    ) -> Any:
        """The same of tensors that may change from run to run: int64 slots, int32 pages, int32
        tokens with the new ones, and int64 rows that the new ones go to, counted through all pages.
        One token of each, or with `keep_N`, int64 zeros, as many as there are rows, to be verified.
        Inert sequences have slot `NO_SLOT`, no token and rows 0."""
        ...

    def copy_slots(self, pairs: Sequence[tuple[int, int]]) -> None: ...

    def copy_pages(self, pairs: Sequence[tuple[int, int]]) -> None: ...


class StepModel(Protocol):
    page_len: int
    """Tokens of a page."""

    def new_pools(self, *, slots: int, pages: int) -> StepPools: ...

    def step(self, token_ids_T: Tensor, pools: Any, step: Any) -> Tensor:
        """fp32 logits [R, V]: of sequences that decode, then of chunks that want them."""
        ...

    def verify(self, token_ids_T: Tensor, pools: Any, step: Any) -> Any:
        """As `step`, with several tokens of each sequence that decodes, whose states stay as they
        were. `logits_RV` of what it returns are those of all tokens."""
        ...

    def accept(self, verified: Any, pools: Any, step: Any, keep_N: Tensor) -> None:
        """Moves the states of sequences that decode on by so many of their tokens."""
        ...
