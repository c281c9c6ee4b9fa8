"""Residual wiring: Block Attention Residuals (K3) and the plain stream (Kimi Linear).

Legend: T packed tokens, D model width, N sources.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace

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


@dataclass
class AttnResStream:
    """Committed blocks and the running sum of the current one, for the tokens in flight; at first
    the embedding.

    A layer's update is added by the read that follows, in one pass with it.
    """

    partial: Tensor | None
    blocks: list[Tensor] = field(default_factory=list)
    update: Tensor | None = None

    def copy(self) -> AttnResStream:
        """The same tensors in a stream that goes on by itself."""
        return replace(self, blocks=[*self.blocks])

    def read(self, query: Query, norm: RMSNorm, then: RMSNorm | None = None) -> Tensor:
        """The mixture of all sources, through the norm `then` if there is one."""
        assert self.partial is not None, "a block is read before anything was added to it"
        if not self.blocks and self.update is None:
            return self.partial if then is None else then(self.partial)
        weight, eps = (None, 0.0) if then is None else (then.weight, then.eps)
        sources = self.partial, self.blocks
        read = attn_res(*sources, query.scaled(norm), norm.eps, self.update, weight, eps)
        if self.update is not None:
            self.partial, self.update = read.partial_TD, None
        return read.h_TD

    def commit(self) -> None:
        """Ends the block: its sum becomes a source, the next sum starts from nothing."""
        self._settle()
        if self.partial is not None:
            self.blocks.append(self.partial)
            self.partial = None

    def add(self, update_TD: Tensor) -> None:
        self._settle()
        if self.partial is None:
            self.partial = update_TD
        else:
            self.update = update_TD

    def _settle(self) -> None:
        if self.partial is not None and self.update is not None:
            self.partial, self.update = self.partial + self.update, None


@dataclass
class PlainStream:
    """h + update, with the same verbs."""

    hidden: Tensor

    def add(self, update_TD: Tensor) -> None:
        self.hidden = self.hidden + update_TD

    def copy(self) -> PlainStream:
        return replace(self)
