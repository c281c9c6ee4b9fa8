"""Tokens' rows to the places of their pairs, in groups that are padded with zeros.

Legend: T tokens, R experts a token, E experts, L width, P padded rows.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor


def spread(
    x_TL: Tensor, slot_TR: Tensor, start_E: Tensor, end_E: Tensor, num_rows: int, align: int
) -> Tensor:
    """x[t] at every slot[t, r] but -1, zeros where a group is padded. Rows behind the last group
    are not written."""
    rows_PL = x_TL.new_empty(num_rows, x_TL.shape[1])
    _launch(x_TL, slot_TR, start_E, end_E, rows_PL, align)
    return rows_PL


def spread_weighted(
    dy_TL: Tensor,
    slot_TR: Tensor,
    start_E: Tensor,
    end_E: Tensor,
    weight_TR: Tensor,
    out_PL: Tensor,
    align: int,
) -> tuple[Tensor, Tensor]:
    """weight[t, r] dy[t] at every slot[t, r], and dy[t] . out[slot[t, r]] in fp32 [T, R]: the
    gradients of what `combine` adds up."""
    rows_PL, dots_TR = torch.empty_like(out_PL), torch.empty_like(weight_TR, dtype=torch.float32)
    _launch(dy_TL, slot_TR, start_E, end_E, rows_PL, align, weight_TR, out_PL, dots_TR)
    return rows_PL, dots_TR


def _launch(
    x_TL: Tensor,
    slot_TR: Tensor,
    start_E: Tensor,
    end_E: Tensor,
    rows_PL: Tensor,
    align: int,
    weight_TR: Tensor | None = None,
    out_PL: Tensor | None = None,
    dots_TR: Tensor | None = None,
) -> None:
    (t, r), width, num_experts = slot_TR.shape, x_TL.shape[1], end_E.shape[0]
    block = triton.next_power_of_2(width)
    _spread[(t + num_experts,)](
        x_TL,
        slot_TR,
        start_E,
        end_E,
        weight_TR,
        out_PL,
        rows_PL,
        dots_TR,
        x_TL.stride(0),
        t,
        WIDTH=width,
        R=r,
        PADDING=align - 1,
        BLOCK=block,
        num_warps=8 if block > 2048 else 4,
    )


@triton.jit(do_not_specialize=["num_tokens"])
def _spread(
    x_p,
    slot_p,
    start_p,
    end_p,
    weight_p,
    out_p,
    rows_p,
    dots_p,
    x_stride,
    num_tokens,
    WIDTH: tl.constexpr,
    R: tl.constexpr,
    PADDING: tl.constexpr,
    BLOCK: tl.constexpr,
):
    l_ = tl.arange(0, BLOCK)
    here_L = l_ < WIDTH
    t = tl.program_id(0).to(tl.int64)
    if t < num_tokens:
        x_L = tl.load(x_p + t * x_stride + l_, mask=here_L, other=0.0)
        for r in tl.static_range(R):
            slot = tl.load(slot_p + t * R + r).to(tl.int64)
            at_L = slot * WIDTH + l_
            there_L = l_ < tl.where(slot >= 0, WIDTH, 0)
            if weight_p is None:
                row_L = x_L
            else:
                x32_L = x_L.to(tl.float32)
                row_L = x32_L * tl.load(weight_p + t * R + r).to(tl.float32)
                out_L = tl.load(out_p + at_L, mask=there_L, other=0.0).to(tl.float32)
                tl.store(dots_p + t * R + r, tl.sum(x32_L * out_L, axis=0))
            tl.store(rows_p + at_L, row_L.to(rows_p.dtype.element_ty), mask=there_L)
    else:
        e = t - num_tokens
        end = tl.load(end_p + e)
        first = tl.load(end_p + e - 1, mask=e > 0, other=0)
        first += tl.load(start_p + e + 1) - tl.load(start_p + e)
        for i in tl.static_range(PADDING):
            here = l_ < tl.where(first + i < end, WIDTH, 0)
            zero_L = tl.zeros([BLOCK], rows_p.dtype.element_ty)
            tl.store(rows_p + (first + i).to(tl.int64) * WIDTH + l_, zero_L, mask=here)
