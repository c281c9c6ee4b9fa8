"""The yardstick: attention with 8 key-value heads, as plain as most open models have it.

Legend: N sequences, D model width, H query heads, G key-value heads, L cached tokens, K head width.

No gate, no norms and no rotation: it does less beside its cache than what it stands beside.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor, nn

from perilune.kernels.bench.gqa_paths import Attend
from perilune.kernels.common.packing import Packing
from perilune.model.linear import Fused, Linear
from perilune.model.pools import Pooled
from perilune.model.sizes import GQA_HEAD_DIM, GQA_HEADS


class GQACache(NamedTuple):
    """Of one layer, without pages; its last token is the newest."""

    k_NGLK: Tensor
    v_NGLK: Tensor

    @staticmethod
    def of(
        num_sequences: int, context: int, generator: torch.Generator, dtype: torch.dtype
    ) -> GQACache:
        """Random."""
        shape = num_sequences, GQA_HEADS, context, GQA_HEAD_DIM
        device = generator.device
        k, v = (torch.empty(shape, device=device, dtype=dtype) for _ in range(2))
        return GQACache(k.normal_(generator=generator), v.normal_(generator=generator))

    @property
    def nbytes(self) -> int:
        return self.k_NGLK.nbytes + self.v_NGLK.nbytes


class GQA(nn.Module):
    """Decodes a token of every sequence from a cache of its own."""

    def __init__(self, hidden_size: int, num_heads: int) -> None:
        super().__init__()
        self.num_heads = -(-num_heads // GQA_HEADS) * GQA_HEADS
        inner, shared = self.num_heads * GQA_HEAD_DIM, GQA_HEADS * GQA_HEAD_DIM
        self.q_proj = Linear(hidden_size, inner)
        self.k_proj, self.v_proj = (Linear(hidden_size, shared) for _ in range(2))
        self.o_proj = Linear(inner, hidden_size)
        self.inputs = Fused([self.q_proj, self.k_proj, self.v_proj])
        self.cache: GQACache | None = None
        self.attend: Attend | None = None

    @staticmethod
    @torch.no_grad()
    def random(
        hidden_size: int, num_heads: int, generator: torch.Generator, dtype: torch.dtype
    ) -> GQA:
        """Ready for inference, with matrices that keep the size of what goes through them."""
        with torch.device("meta"):
            made = GQA(hidden_size, num_heads)
        made = made.to(dtype).to_empty(device=generator.device)
        for weight in made.parameters():
            weight.normal_(0.0, weight.shape[-1] ** -0.5, generator=generator)
        made.inputs.freeze()
        return made

    def forward(
        self,
        x_TD: Tensor,
        packing: Packing | None,
        at: Pooled | None,
    ) -> Tensor:
        assert self.cache is not None, "a cache has to be given first"
        assert self.attend is not None, "a way to attend has to be chosen first"
        q_TX, k_TX, v_TX = self.inputs.split(x_TD)
        k_NGLK, v_NGLK = self.cache
        k_NGLK[:, :, -1] = k_TX.unflatten(1, (GQA_HEADS, -1))
        v_NGLK[:, :, -1] = v_TX.unflatten(1, (GQA_HEADS, -1))
        q_NHK = q_TX.unflatten(1, (self.num_heads, -1)).contiguous()
        return self.o_proj(self.attend(q_NHK, k_NGLK, v_NGLK).flatten(1))
