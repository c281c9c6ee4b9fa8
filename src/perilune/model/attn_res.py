"""Residual wiring: Block Attention Residuals (K3) and the plain stream (Kimi Linear).

Legend: T packed tokens, D model width, N sources.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from perilune.kernels.registry import resolve
from perilune.model.norm import RMSNorm

attn_res = resolve("attn_res")


class Query(nn.Module):
    """Pseudo-query of one read, [1, D] as in the checkpoint."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(1, width))
        self.scaled_D: Tensor | None = None

    def freeze(self, norm: RMSNorm) -> None:
        self.scaled_D = self.scaled(norm).detach()

    def scaled(self, norm: RMSNorm) -> Tensor:
        """The query times the weight of the norm of the sources, [D], at least fp32."""
        if self.scaled_D is not None:
            return self.scaled_D
        wide = torch.promote_types(torch.float32, self.weight.dtype)
        return self.weight[0].to(wide) * norm.weight.to(wide)


class AttnResStream:
    """Committed blocks and the running sum of the current one, for the tokens in flight."""

    def __init__(self, embedding_TD: Tensor) -> None:
        self.blocks: list[Tensor] = []
        self.partial: Tensor | None = embedding_TD

    def read(self, query: Query, norm: RMSNorm) -> Tensor:
        sources = self.sources()
        if len(sources) == 1:
            return sources[0]
        return attn_res(torch.stack(sources), query.scaled(norm), norm.eps)

    def sources(self) -> list[Tensor]:
        return self.blocks if self.partial is None else [*self.blocks, self.partial]

    def commit(self) -> None:
        """Ends the block: its sum becomes a source, the next sum starts from nothing."""
        if self.partial is not None:
            self.blocks.append(self.partial)
            self.partial = None

    def add(self, update_TD: Tensor) -> None:
        self.partial = update_TD if self.partial is None else self.partial + update_TD


class PlainStream:
    """h + update, with the same verbs."""

    def __init__(self, embedding_TD: Tensor) -> None:
        self.hidden = embedding_TD

    def add(self, update_TD: Tensor) -> None:
        self.hidden = self.hidden + update_TD
