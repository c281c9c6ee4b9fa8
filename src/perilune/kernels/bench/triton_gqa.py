"""One token's grouped-query attention in Triton, its context in splits: a peer, never served.

Legend: N sequences, G key-value heads, J query heads of each, L cached tokens, D head width,
S splits of a context.

A program reads the keys and values of one head in one split, once for all J query heads; a second
launch weighs the splits. All sequences have L tokens.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.errors import TritonError

from perilune.kernels.common.triton_math import LOG2_E

FEWEST_ROWS = 16
"""Of an operand of `tl.dot`; J is padded to so many."""
PROGRAMS = 132 * 16
"""Aimed at: several waves over the largest card, so that none of them ends half empty."""


class Tile(NamedTuple):
    tokens: int
    """Of a step of the loop."""
    warps: int
    stages: int


TILES = (Tile(64, 4, 3), Tile(128, 4, 3), Tile(128, 8, 3))
"""What is tried: which one is fastest depends on the lengths."""


def attend(q_NHD: Tensor, k_NGLD: Tensor, v_NGLD: Tensor, tile: Tile) -> Tensor:
    """[N, H = G J, D]; query heads of a key-value head are neighbours.

    Raises:
        RuntimeError: Triton refuses the tile.
    """
    (n, h, d), (_, g, length, _) = q_NHD.shape, k_NGLD.shape
    assert k_NGLD.is_contiguous(), k_NGLD.stride()
    assert v_NGLD.is_contiguous(), v_NGLD.stride()
    steps = triton.cdiv(length, tile.tokens)
    splits = min(steps, max(1, PROGRAMS // (n * g)))
    per_split = triton.cdiv(steps, splits) * tile.tokens
    splits = triton.cdiv(length, per_split)
    partial = q_NHD.new_empty((n * h, splits, d), dtype=torch.float32)
    lse = q_NHD.new_empty((n * h, splits), dtype=torch.float32)
    o_NHD = torch.empty_like(q_NHD)
    of_tile: Any = {"num_warps": tile.warps, "num_stages": tile.stages}
    rows = triton.next_power_of_2(max(FEWEST_ROWS, h // g))
    scale = d**-0.5 * LOG2_E.value
    try:
        _attend_fwd_kernel[(n * g * splits,)](
            q_NHD.contiguous(),
            k_NGLD,
            v_NGLD,
            partial,
            lse,
            length,
            per_split,
            splits,
            scale,
            J=h // g,
            BJ=rows,
            D=d,
            BT=tile.tokens,
            **of_tile,
        )
        _merge_fwd_kernel[(n * h,)](
            partial, lse, o_NHD, splits, D=d, BS=triton.next_power_of_2(splits), num_warps=4
        )
    except TritonError as error:
        raise RuntimeError(str(error)) from error
    return o_NHD


@triton.jit
def _attend_fwd_kernel(
    q,
    k,
    v,
    partial,
    lse,
    length,
    per_split,
    splits,
    scale,
    J: tl.constexpr,
    BJ: tl.constexpr,
    D: tl.constexpr,
    BT: tl.constexpr,
):
    i_ng = (tl.program_id(0) // splits).to(tl.int64)
    i_split = tl.program_id(0) % splits
    o_j, o_d, o_t = tl.arange(0, BJ), tl.arange(0, D), tl.arange(0, BT)
    is_head = o_j < J
    rows = i_ng * J + o_j
    b_q = tl.load(q + rows[:, None] * D + o_d[None, :], mask=is_head[:, None], other=0.0)
    k += i_ng * length * D
    v += i_ng * length * D
    first = i_split * per_split
    end = min(first + per_split, length)
    b_max = tl.full([BJ], float("-inf"), tl.float32)
    b_sum = tl.zeros([BJ], tl.float32)
    b_o = tl.zeros([BJ, D], tl.float32)
    for begin in range(first, end, BT):
        token = begin + o_t
        is_token = token < end
        at = token[:, None] * D + o_d[None, :]
        b_k = tl.load(k + at, mask=is_token[:, None], other=0.0)
        b_v = tl.load(v + at, mask=is_token[:, None], other=0.0)
        b_s = tl.dot(b_q, tl.trans(b_k)) * scale
        b_s = tl.where(is_token[None, :], b_s, float("-inf"))
        b_new = tl.maximum(b_max, tl.max(b_s, 1))
        b_p = tl.exp2(b_s - b_new[:, None])
        b_fade = tl.exp2(b_max - b_new)
        b_sum = b_sum * b_fade + tl.sum(b_p, 1)
        b_o = b_o * b_fade[:, None] + tl.dot(b_p.to(b_v.dtype), b_v)
        b_max = b_new
    place = rows * splits + i_split
    tl.store(
        partial + place[:, None] * D + o_d[None, :], b_o / b_sum[:, None], mask=is_head[:, None]
    )
    tl.store(lse + place, b_max + tl.log2(b_sum), mask=is_head)


@triton.jit
def _merge_fwd_kernel(partial, lse, o, splits, D: tl.constexpr, BS: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    o_s, o_d = tl.arange(0, BS), tl.arange(0, D)
    is_split = o_s < splits
    b_lse = tl.load(lse + row * splits + o_s, mask=is_split, other=float("-inf"))
    b_share = tl.exp2(b_lse - tl.max(b_lse, 0))
    at = (row * splits + o_s)[:, None] * D + o_d[None, :]
    b_part = tl.load(partial + at, mask=is_split[:, None], other=0.0)
    b_o = tl.sum(b_part * b_share[:, None], 0) / tl.sum(b_share, 0)
    tl.store(o + row * D + o_d, b_o.to(o.dtype.element_ty))
