"""Whole keys for kernels that want them, with the shared channels in every head, in one pass.

Legend: T tokens, H heads, N a head's own + R shared key channels.
"""

from __future__ import annotations

from typing import Any

import triton
import triton.language as tl
from torch import Tensor
from torch.autograd.function import Function, once_differentiable

HEADS = 32
"""Of one token, by one program."""


class Join(Function):
    """[T, H, N + R], contiguous, from [T, H, N] and [T, R] whose last axes are in one piece."""

    @staticmethod
    def forward(ctx: Any, k_THN: Tensor, shared_TR: Tensor) -> Tensor:
        (t, h, n), r = k_THN.shape, shared_TR.shape[1]
        ctx.own = n
        k_THK = k_THN.new_empty(t, h, n + r)
        if t:
            _join[(t * triton.cdiv(h, HEADS),)](
                k_THN,
                shared_TR,
                k_THK,
                *k_THN.stride()[:2],
                shared_TR.stride(0),
                H=h,
                N=n,
                R=r,
                BH=HEADS,
                BN=triton.next_power_of_2(n),
                BR=triton.next_power_of_2(r),
                num_warps=4,
            )
        return k_THK

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dk_THK: Tensor) -> tuple[Tensor, Tensor]:
        return dk_THK[..., : ctx.own], dk_THK[..., ctx.own :].sum(1)


@triton.jit
def _join(
    k_p,
    r_p,
    out_p,
    k_stride,
    k_head,
    r_stride,
    H: tl.constexpr,
    N: tl.constexpr,
    R: tl.constexpr,
    BH: tl.constexpr,
    BN: tl.constexpr,
    BR: tl.constexpr,
):
    TILES: tl.constexpr = (H + BH - 1) // BH
    t = (tl.program_id(0) // TILES).to(tl.int64)
    h_ = (tl.program_id(0) % TILES) * BH + tl.arange(0, BH)
    n_, r_ = tl.arange(0, BN), tl.arange(0, BR)
    here_H1 = (h_ < H)[:, None]
    own_HN = here_H1 & (n_ < N)[None, :]
    k_HN = tl.load(k_p + t * k_stride + h_[:, None] * k_head + n_[None, :], mask=own_HN)
    shared_R = tl.load(r_p + t * r_stride + r_, mask=r_ < R)
    out_at = out_p + t * H * (N + R) + h_[:, None] * (N + R)
    tl.store(out_at + n_[None, :], k_HN, mask=own_HN)
    shared_HR = tl.broadcast_to(shared_R[None, :], [BH, BR])
    tl.store(out_at + N + r_[None, :], shared_HR, mask=here_H1 & (r_ < R)[None, :])
