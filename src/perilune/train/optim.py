"""Muon for matrices, AdamW for the rest.

Legend: N matrices of one shape, M rows, K columns.
"""

from __future__ import annotations

import math
from collections import defaultdict

import torch
from torch import Tensor, nn

from perilune.train.config import OptimConfig

# Quintic whose iteration drives singular values to about 1 (Jordan et al., "Muon", 2024).
_NS_COEFFICIENTS = (3.4445, -4.7750, 2.0315)
_NS_STEPS = 5


def orthogonalise(g_NMK: Tensor) -> Tensor:
    """Nearest semi-orthogonal matrices, approximately, by Newton-Schulz in bf16 on a GPU."""
    a, b, c = _NS_COEFFICIENTS
    x = g_NMK.bfloat16() if g_NMK.is_cuda else g_NMK.float()
    tall = x.shape[-2] > x.shape[-1]
    if tall:
        x = x.mT
    x = x / (x.norm(dim=(-2, -1), keepdim=True) + 1e-7)
    for _ in range(_NS_STEPS):
        gram = x @ x.mT
        x = a * x + (b * gram + c * gram @ gram) @ x
    return (x.mT if tall else x).to(g_NMK.dtype)


def is_matrix(name: str, p: Tensor) -> bool:
    """Muon's share: hidden matrices; embeddings, head, convolutions and queries are AdamW's."""
    if p.ndim < 2 or name.endswith(("embed_tokens.weight", "lm_head.weight")):
        return False
    return "conv1d" not in name and not name.endswith("res_proj.weight")


class Muon(torch.optim.Optimizer):
    """Momentum, orthogonalised; scaled by 0.2 sqrt(max(M, K)) to AdamW's update size (Moonlight,
    arXiv 2502.16982). Matrices of one shape are updated together."""

    def __init__(self, params: list[Tensor], lr: float, momentum: float, weight_decay: float):
        super().__init__(params, {"lr": lr, "momentum": momentum, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # pyrefly: ignore[bad-override]
        for group in self.param_groups:
            by_shape: dict[torch.Size, list[Tensor]] = defaultdict(list)
            for p in group["params"]:
                if p.grad is not None:
                    by_shape[p.shape].append(p)
            for params in by_shape.values():
                self._step_alike(params, group)

    def _step_alike(self, params: list[Tensor], group: dict) -> None:
        momentum = group["momentum"]
        for p in params:
            if "momentum" not in self.state[p]:
                self.state[p]["momentum"] = torch.zeros_like(p)
        grads = [p.grad for p in params if p.grad is not None]
        buffers = [self.state[p]["momentum"] for p in params]
        torch._foreach_mul_(buffers, momentum)
        torch._foreach_add_(buffers, grads, alpha=1 - momentum)
        nesterov = torch._foreach_lerp(grads, buffers, momentum)
        stacked = torch.stack(nesterov)
        rows, columns = stacked.shape[-2:]
        update = orthogonalise(stacked.view(-1, rows, columns)).view(stacked.shape)
        torch._foreach_mul_(params, 1 - group["lr"] * group["weight_decay"])
        scale = -group["lr"] * 0.2 * math.sqrt(max(rows, columns))
        torch._foreach_add_(params, list(update.unbind(0)), alpha=scale)


def build_optimizers(model: nn.Module, config: OptimConfig) -> list[torch.optim.Optimizer]:
    """One optimiser a kind; norms, biases and pseudo-queries are not decayed."""
    matrices, decayed, plain = [], [], []
    for name, p in model.named_parameters():
        if is_matrix(name, p):
            matrices.append(p)
        elif p.ndim >= 2 and not name.endswith("res_proj.weight"):
            decayed.append(p)
        else:
            plain.append(p)
    groups = [
        {"params": decayed, "weight_decay": config.weight_decay},
        {"params": plain, "weight_decay": 0.0},
    ]
    lr = config.peak_lr
    return [
        Muon(matrices, lr, config.muon_momentum, config.weight_decay),
        torch.optim.AdamW(groups, lr=lr, betas=config.adam_betas, foreach=True),
    ]


def lr_at(step: int, steps: int, config: OptimConfig) -> float:
    """Linear warm-up, constant, then linear to zero, which step number `steps` would reach."""
    rising = (step + 1) / max(1, config.warmup_steps)
    falling = (steps - step) / max(1, steps * config.decay_ratio)
    return config.peak_lr * min(1.0, rising, falling)
