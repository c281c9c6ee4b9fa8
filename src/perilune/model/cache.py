"""What a sequence leaves behind: fp32 KDA states, convolution windows, latent rows.

Legend: H heads, K key width, V value width, W conv width, C channels, S cached tokens.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from perilune.model.config import ModelConfig


@dataclass(slots=True)
class KDACache:
    """Constant size. Layers mutate both tensors in place; a state cannot be rolled back."""

    state_HKV: Tensor
    window_WC: Tensor
    """The last W-1 inputs of the q, k and v convolutions, side by side, oldest first."""

    @property
    def nbytes(self) -> int:
        return self.state_HKV.nbytes + self.window_WC.nbytes


@dataclass(slots=True)
class MLACache:
    """One row of normalised latent and shared key channels per token; the buffer doubles."""

    buffer_SC: Tensor
    length: int = 0

    def append(self, rows_TC: Tensor) -> Tensor:
        """Adds T rows and returns all of them [S, C], valid until the next append."""
        end = self.length + rows_TC.shape[0]
        if end > self.buffer_SC.shape[0]:
            grown = self.buffer_SC.new_empty(
                max(end, 2 * self.buffer_SC.shape[0]), rows_TC.shape[1]
            )
            grown[: self.length] = self.buffer_SC[: self.length]
            self.buffer_SC = grown
        self.buffer_SC[self.length : end] = rows_TC
        self.length = end
        return self.buffer_SC[:end]

    def as_pages(self) -> tuple[Tensor, Tensor, Tensor]:
        """As a paged kernel takes them: a pool with one page, a table and a length [1]."""
        on_device = {"dtype": torch.int32, "device": self.buffer_SC.device}
        table_NW = torch.zeros(1, 1, **on_device)
        return self.buffer_SC[None], table_NW, torch.full((1,), self.length, **on_device)

    @property
    def nbytes(self) -> int:
        return self.buffer_SC.nbytes


@dataclass(slots=True)
class SequenceCache:
    """Everything the model keeps of one sequence. Freed by dropping the last reference."""

    layers: list[KDACache | MLACache]
    length: int = 0
    """Tokens seen."""

    @property
    def nbytes(self) -> int:
        return sum(layer.nbytes for layer in self.layers)

    def clone(self) -> SequenceCache:
        """An independent copy: later tokens of one do not show in the other."""
        return SequenceCache([_clone(layer) for layer in self.layers], self.length)


def _clone(layer: KDACache | MLACache) -> KDACache | MLACache:
    if isinstance(layer, KDACache):
        return KDACache(layer.state_HKV.clone(), layer.window_WC.clone())
    return MLACache(layer.buffer_SC.clone(), layer.length)


def new_cache(
    config: ModelConfig, device: torch.device, dtype: torch.dtype, capacity: int = 64
) -> SequenceCache:
    """An empty cache; `capacity` latent rows are reserved at first."""
    kda, mla = config.kda, config.mla
    heads, width = kda.num_heads, kda.head_dim
    state_dtype = torch.promote_types(torch.float32, dtype)

    def layer(index: int) -> KDACache | MLACache:
        if config.is_mla(index):
            return MLACache(torch.empty(capacity, mla.cache_width, device=device, dtype=dtype))
        return KDACache(
            torch.zeros(heads, width, width, device=device, dtype=state_dtype),
            torch.zeros(kda.conv_width - 1, 3 * heads * width, device=device, dtype=state_dtype),
        )

    return SequenceCache([layer(i) for i in range(config.num_layers)])
