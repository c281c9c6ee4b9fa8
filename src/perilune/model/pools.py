"""What many sequences leave behind, side by side: recurrent states in slots, latents in pages.

Legend: L layers of a kind, S slots, H heads, K key width, V value width, W conv width, C channels,
P pages, B = `PAGE` tokens of a page, T tokens of a step, M chunks, E cuts.

A sequence owns one slot, the same in every KDA layer, and pages, the same in every MLA layer;
pages may be shared by sequences with a common prefix. Who owns what is the engine's to know.
Layers read and write the pools in place, where a `Step` says. What lies in slots and pages that
nobody owns, and in rows behind a sequence's last token, is never part of a result: it may be NaN.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from perilune.model.config import ModelConfig
from perilune.model.make_step import Limits, make_step
from perilune.model.step import PAGE, DecodeRange, Decoding, Prefilling, PrefillRange, Step


class StatePool(NamedTuple):
    """Of one KDA layer."""

    state_SHKV: Tensor
    window_SWC: Tensor
    """The last W - 1 inputs of the q, k and v convolutions, side by side, oldest first."""

    def before(self, chunks: PrefillRange) -> tuple[Tensor, Tensor] | tuple[None, None]:
        """Copies of the states and windows that chunks start from: zeros for a new sequence,
        whatever its slot holds. None where all are new."""
        if chunks.all_new:
            return None, None
        state_MHKV, window_MWC = (x.index_select(0, chunks.slot_M) for x in self)
        if chunks.new_M is not None:
            state_MHKV.masked_fill_(chunks.new_M[:, None, None, None], 0)
            window_MWC.masked_fill_(chunks.new_M[:, None, None], 0)
        return state_MHKV, window_MWC

    def windows_at_cuts(
        self, x_TC: Tensor, before_MWC: Tensor | None, chunks: PrefillRange
    ) -> Tensor:
        """[E, W - 1, C]: the last inputs before each cut, of `x_TC`, the chunks', and of the
        windows before them (None: zeros) where a cut is near the start."""
        cuts = chunks.window_cuts
        window_IC = x_TC.index_select(0, cuts.token_I).to(self.window_SWC.dtype)
        if cuts.place_O.shape[0]:
            if before_MWC is None:
                window_IC.index_fill_(0, cuts.place_O, 0)
            else:
                older_OC = before_MWC.flatten(0, 1).index_select(0, cuts.carried_O)
                window_IC.index_copy_(0, cuts.place_O, older_OC)
        return window_IC.view(chunks.cut_slot_E.shape[0], *self.window_SWC.shape[1:])

    def write(self, slot_N: Tensor, state_NHKV: Tensor, window_NWC: Tensor) -> None:
        self.state_SHKV.index_copy_(0, slot_N, state_NHKV.to(self.state_SHKV.dtype))
        self.window_SWC.index_copy_(0, slot_N, window_NWC.to(self.window_SWC.dtype))


class LatentPool(NamedTuple):
    """Of one MLA layer."""

    rows_PBC: Tensor

    @property
    def rows_RC(self) -> Tensor:
        """As `Step` counts them."""
        return self.rows_PBC.flatten(0, 1)

    def write(self, rows_TC: Tensor, step: Step) -> None:
        """The newest row of each token."""
        self.rows_RC.index_copy_(0, step.row_T, rows_TC)


class Pooled(NamedTuple):
    """A layer's pool, and what the step does there."""

    pool: StatePool | LatentPool
    step: Step
    drafted: list[Any] | None = None
    """Where drafts are verified, KDA layers append what `KDA.decode` needs to accept them."""


class StepOnPools(NamedTuple):
    layers: Sequence[StatePool | LatentPool]
    step: Step
    drafted: list[Any] | None = None

    def of(self, layer: int) -> Pooled:
        return Pooled(self.layers[layer], self.step, self.drafted)


@dataclass(frozen=True, slots=True, kw_only=True)
class Pools:
    """Of all layers, in three tensors."""

    state_LSHKV: Tensor
    window_LSWC: Tensor
    rows_LPBC: Tensor
    """Page `SCRATCH_PAGE` is for padded rows."""
    layers: tuple[StatePool | LatentPool, ...]
    """Views, in the order of the model's layers."""
    limits: Limits

    @staticmethod
    def of(
        config: ModelConfig,
        *,
        slots: int,
        pages: int,
        device: torch.device,
        dtype: torch.dtype,
        state_dtype: torch.dtype | None = None,
    ) -> Pools:
        """Zeros. `dtype`, the model's, is that of windows and latents, which lose nothing by it;
        states are in `state_dtype`, None: fp32, or fp64 in a model of it. In bf16 a state is
        rounded whenever it is kept, and read on in fp32."""
        num_mla, kda = len(config.mla_layers), config.kda
        num_kda, heads, width = config.num_layers - num_mla, kda.num_heads, kda.head_dim
        wide = torch.promote_types(torch.float32, dtype)

        def zeros(*shape: int, dtype: torch.dtype = dtype) -> Tensor:
            return torch.zeros(shape, device=device, dtype=dtype)

        state = zeros(num_kda, slots, heads, width, width, dtype=state_dtype or wide)
        window = zeros(num_kda, slots, kda.conv_width - 1, 3 * heads * width)
        rows = zeros(num_mla, pages, PAGE, config.mla.cache_width)
        states = map(StatePool, state, window)
        latents = map(LatentPool, rows)
        return Pools(
            state_LSHKV=state,
            window_LSWC=window,
            rows_LPBC=rows,
            layers=tuple(
                next(latents if config.is_mla(i) else states) for i in range(config.num_layers)
            ),
            limits=Limits(device, slots, pages, kda.conv_width - 1),
        )

    @property
    def nbytes(self) -> int:
        return self.state_LSHKV.nbytes + self.window_LSWC.nbytes + self.rows_LPBC.nbytes

    @property
    def slot_nbytes(self) -> int:
        """Of one sequence's states and windows, in all layers."""
        return (self.state_LSHKV.nbytes + self.window_LSWC.nbytes) // self.limits.num_slots

    @property
    def page_nbytes(self) -> int:
        """Of one page, in all layers."""
        return self.rows_LPBC.nbytes // self.limits.num_pages

    def step(
        self,
        decoding: Sequence[Decoding],
        prefilling: Sequence[Prefilling] = (),
        *,
        num_each: int = 1,
        verify: bool = False,
        padded_to: int = 0,
        table_width: int = 1,
    ) -> Step:
        """As `make_step`, on these pools."""
        return make_step(
            self.limits,
            decoding,
            prefilling,
            num_each=num_each,
            verify=verify,
            padded_to=padded_to,
            table_width=table_width,
        )

    def decode_step(
        self,
        slot_N: Tensor,
        table_NJ: Tensor,
        length_N: Tensor,
        row_T: Tensor,
        keep_N: Tensor | None = None,
    ) -> Step:
        """A step of as many tokens of each as there are rows, of tensors that are the caller's: a
        graph captured with it runs whatever they hold then. They are as in `DecodeRange` and
        `Step.row_T`; nothing is checked."""
        num_each = row_T.shape[0] // slot_N.shape[0]
        return Step(DecodeRange(slot_N, table_NJ, length_N, keep_N, num_each), (), row_T, None)

    def copy_slots(self, pairs: Sequence[tuple[int, int]]) -> None:
        """(source, destination) each: states and windows of all layers, as if all at once: a slot
        may be both."""
        _copy(self.state_LSHKV, pairs)
        _copy(self.window_LSWC, pairs)

    def copy_pages(self, pairs: Sequence[tuple[int, int]]) -> None:
        """(source, destination) each, in all layers, as if all at once."""
        _copy(self.rows_LPBC, pairs)


def _copy(pool_LS: Tensor, pairs: Sequence[tuple[int, int]]) -> None:
    sources, targets = [source for source, _ in pairs], [target for _, target in pairs]
    if len(set(targets)) < len(targets):
        raise ValueError(f"two copies to one place: {sorted(targets)}")
    # Read before anything is written only where it matters: what is read needs room of its own.
    together = not set(sources).isdisjoint(targets)
    read = [pool_LS[:, s].clone() if together else pool_LS[:, s] for s in sources]
    for target, x_L in zip(targets, read, strict=True):
        pool_LS[:, target] = x_L
