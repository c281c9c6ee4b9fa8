"""Queries of absorbed attention: a head's own channels in latent space, shared ones behind them.

Legend: T query tokens, H heads, K a head's own channels, C latent width, R shared channels.
"""

from __future__ import annotations

import torch
from torch import Tensor


def queries(own_THK: Tensor, weight_HKC: Tensor, shared_THR: Tensor) -> Tensor:
    """[T, H, C + R]: every head's own channels times its weight, and the shared ones."""
    if own_THK.is_cuda and not torch.is_grad_enabled():
        return written(own_THK, weight_HKC, shared_THR)
    q_HTC = own_THK.transpose(0, 1) @ weight_HKC
    return torch.cat([q_HTC.transpose(0, 1), shared_THR], dim=-1)


def written(own_THK: Tensor, weight_HKC: Tensor, shared_THR: Tensor) -> Tensor:
    """The same without gradients: the product goes where attention reads it, instead of being
    copied there, 25 MB for 128 tokens of K3's heads."""
    (t, h, r), c = shared_THR.shape, weight_HKC.shape[2]
    q_THC = own_THK.new_empty(t, h, c + r)
    torch.bmm(own_THK.transpose(0, 1), weight_HKC, out=q_THC[..., :c].transpose(0, 1))
    q_THC[..., c:] = shared_THR
    return q_THC
