"""Muon, block by block: momentum, orthogonalised by Newton-Schulz.

Legend: N matrices of one shape, M rows, K columns.

torch.optim.Muon orthogonalises one whole 2-D matrix at a time, in bf16 wherever it runs. Here
experts are stacked, attention is orthogonalised head by head, blocks of one shape share a few
batched products instead of a few hundred small ones, a CPU (which does bf16 no faster) computes in
fp32, and a parameter may be shared out among ranks. Update, scale and coefficients are the same: a
test compares the two.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from perilune.train.whole_blocks import WholeBlocks, cut, own_part

# Quintic whose iteration drives singular values to about 1 (Jordan et al., "Muon", 2024).
NS_COEFFICIENTS = (3.4445, -4.7750, 2.0315)
NS_STEPS = 5
AT_ONCE = 1 << 28
"""Numbers that are orthogonalised together: few enough that copies of them fit beside a model."""


def orthogonalise(g_NMK: Tensor) -> Tensor:
    """Nearest semi-orthogonal matrices, approximately, by Newton-Schulz: in bf16 on a GPU."""
    a, b, c = NS_COEFFICIENTS
    wide = torch.promote_types(g_NMK.dtype, torch.float32)
    x = g_NMK.flatten(0, -3) if g_NMK.ndim > 2 else g_NMK[None]
    x = x.to(torch.bfloat16 if x.is_cuda else wide)
    tall = x.shape[-2] > x.shape[-1]
    if tall:
        x = x.mT
    x = x / (x.norm(dim=(-2, -1), keepdim=True) + 1e-7)
    for _ in range(NS_STEPS):
        gram = x @ x.mT
        x = torch.baddbmm(x, torch.baddbmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    return (x.mT if tall else x).reshape(g_NMK.shape).to(g_NMK.dtype)


class Muon(torch.optim.Optimizer):
    """Momentum, orthogonalised; scaled by 0.2 sqrt(max(M, K)) to AdamW's update size (Moonlight,
    arXiv 2502.16982).

    A group may have `blocks`: runs of rows, over and over, in which its matrices are
    orthogonalised and scaled each by itself (K3's per-head Muon).
    """

    def __init__(
        self, params: Any, lr: float, momentum: float, weight_decay: float, blocks: Any = ()
    ) -> None:
        defaults = {"lr": lr, "momentum": momentum, "weight_decay": weight_decay, "blocks": blocks}
        super().__init__(params, defaults)

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # pyrefly: ignore[bad-override]
        for group in self.param_groups:
            params = [p for p in group["params"] if p.grad is not None]
            if params:
                self._step_group(params, group)

    def _step_group(self, params: list[Tensor], group: dict[str, Any]) -> None:
        layouts = [WholeBlocks(p, group["blocks"]) for p in params]
        own = [own_part(p) for p in params]
        updates = self._nesterov(params, group["momentum"])
        whole = [layout.gathered(u) for layout, u in zip(layouts, updates, strict=True)]
        orthogonalise_blocks([block for x in whole for block in cut(x, group["blocks"])])
        updates = [layout.given_back(x) for layout, x in zip(layouts, whole, strict=True)]
        torch._foreach_mul_(own, 1 - group["lr"] * group["weight_decay"])
        torch._foreach_add_(own, updates, alpha=-group["lr"])

    def _nesterov(self, params: list[Tensor], momentum: float) -> list[Tensor]:
        for p in params:
            if "momentum" not in self.state[p]:
                self.state[p]["momentum"] = torch.zeros_like(p)
        grads = [own_part(p.grad) for p in params if p.grad is not None]
        buffers = [own_part(self.state[p]["momentum"]) for p in params]
        torch._foreach_lerp_(buffers, grads, 1 - momentum)
        return list(torch._foreach_lerp(grads, buffers, momentum))


def orthogonalise_blocks(blocks_NMK: list[Tensor]) -> None:
    """Orthogonalises and scales in place; those of one shape together."""
    by_shape: dict[torch.Size, list[Tensor]] = defaultdict(list)
    for block in blocks_NMK:
        by_shape[block.shape[-2:]].append(block)
    for (rows, columns), alike in by_shape.items():
        for some in _batches(alike):
            found = orthogonalise(some[0] if len(some) == 1 else torch.cat(some))
            found = found * (0.2 * math.sqrt(max(rows, columns)))
            torch._foreach_copy_(some, list(found.split([len(block) for block in some])))


def _batches(blocks_NMK: list[Tensor]) -> Iterator[list[Tensor]]:
    """In order, each of `AT_ONCE` numbers at most or of matrices of one parameter."""
    batch: list[Tensor] = []
    for block in blocks_NMK:
        if batch and sum(map(Tensor.numel, batch)) + block.numel() > AT_ONCE:
            yield batch
            batch = []
        batch.append(block)
    if batch:
        yield batch
