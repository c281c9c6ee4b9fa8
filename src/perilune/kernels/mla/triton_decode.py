"""Absorbed decoding: a program attends from a tile of heads to a part of the context, once read.

Legend: S cached tokens, H heads, C latent width, R shared key channels, N tokens of a tile, P parts
of the context.

The tile of latents is operand of both products, `s = q c^T` and `o += p c`, so its shared memory
is filled once, and a tile ahead of use. The softmax is a running one (Milakov and Gimelshein,
arXiv 1805.02867) of base 2; a part leaves its own output and log-sum, which `_merge` weighs.
"""

from __future__ import annotations

from functools import cache
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from perilune.kernels.common.triton_math import LOG2_E, dot_precision, exp2, uses_ptx

INTERPRETED_PROGRAMS = 6
MERGED_CHANNELS = 32


class Tile(NamedTuple):
    heads: int
    tokens: int
    num_warps: int
    in_chunks: bool
    """Scores from a few channels at a time."""


class Parts(NamedTuple):
    number: int
    length: int
    """Tokens of each but the last, which has at least one."""


TILE = Tile(64, 64, 8, in_chunks=False)
"""What a warp group's product takes; the memory of a multiprocessor holds two tiles of latents."""
FP32_TILE = Tile(16, 16, 8, in_chunks=True)


def parts_of(tokens: int, tile: Tile, head_tiles: int, programs: int) -> Parts:
    """As many parts as all programs together can take in one go, of whole tiles each."""
    tiles = triton.cdiv(tokens, tile.tokens)
    length = triton.cdiv(tiles, max(1, programs // head_tiles)) * tile.tokens
    return Parts(triton.cdiv(tokens, length), length)


def attend(q_HC: Tensor, latent_SC: Tensor, rank: int, scale: float) -> Tensor:
    """The mixed latents [H, C]."""
    (heads, width), tokens = q_HC.shape, latent_SC.shape[0]
    tile = FP32_TILE if q_HC.dtype == torch.float32 else TILE
    head_tiles = triton.cdiv(heads, tile.heads)
    parts = parts_of(tokens, tile, head_tiles, num_programs(q_HC.device))
    o_HC = q_HC.new_empty(heads, rank)
    partial_PHC = q_HC.new_empty(parts.number, heads, rank, dtype=torch.float32)
    lse_PH = q_HC.new_empty(parts.number, heads, dtype=torch.float32)
    _attend[(parts.number * head_tiles,)](
        q_HC,
        latent_SC,
        partial_PHC,
        lse_PH,
        q_HC.stride(0),
        tokens,
        parts.length,
        scale * LOG2_E.value,
        H=heads,
        C=rank,
        R=width - rank,
        STRIDE=latent_SC.stride(0),
        BH=tile.heads,
        BN=tile.tokens,
        BC=_block(rank),
        BR=_block(width - rank),
        PRECISION=dot_precision(q_HC.dtype),
        PTX=uses_ptx(q_HC.device),
        IN_CHUNKS=tile.in_chunks,
        num_warps=tile.num_warps,
    )
    _merge[(heads * triton.cdiv(rank, MERGED_CHANNELS),)](
        partial_PHC,
        lse_PH,
        o_HC,
        parts.number,
        H=heads,
        C=rank,
        BC=MERGED_CHANNELS,
        BP=triton.next_power_of_2(parts.number),
        PTX=uses_ptx(q_HC.device),
        num_warps=4,
    )
    return o_HC


@cache
def num_programs(device: torch.device) -> int:
    """How many programs run at a time: a tile's memory takes a multiprocessor."""
    if device.type != "cuda":
        return INTERPRETED_PROGRAMS
    return torch.cuda.get_device_properties(device).multi_processor_count


def _block(channels: int) -> int:
    return max(16, triton.next_power_of_2(channels))


@triton.jit(do_not_specialize=["tokens", "part_length"])
def _attend(
    q_p,
    latent_p,
    partial_p,
    lse_p,
    q_stride,
    tokens,
    part_length,
    scale,
    H: tl.constexpr,
    C: tl.constexpr,
    R: tl.constexpr,
    STRIDE: tl.constexpr,
    BH: tl.constexpr,
    BN: tl.constexpr,
    BC: tl.constexpr,
    BR: tl.constexpr,
    PRECISION: tl.constexpr,
    PTX: tl.constexpr,
    IN_CHUNKS: tl.constexpr,
):
    # The head tiles of a part are neighbours: its latents come from memory once.
    HEAD_TILES: tl.constexpr = (H + BH - 1) // BH
    part = (tl.program_id(0) // HEAD_TILES).to(tl.int64)
    h_ = (tl.program_id(0) % HEAD_TILES) * BH + tl.arange(0, BH)
    c_, r_, n_ = tl.arange(0, BC), tl.arange(0, BR), tl.arange(0, BN)
    DTYPE: tl.constexpr = latent_p.dtype.element_ty
    here_H1 = (h_ < H)[:, None]
    q_at = q_p + h_[:, None] * q_stride
    if not IN_CHUNKS:
        q_HC = tl.load(q_at + c_[None, :], mask=here_H1 & (c_ < C)[None, :], other=0.0)
        q_HR = tl.load(q_at + C + r_[None, :], mask=here_H1 & (r_ < R)[None, :], other=0.0)
    highest_H = tl.full([BH], float("-inf"), tl.float32)
    total_H = tl.zeros([BH], tl.float32)
    o_HC = tl.zeros([BH, BC], tl.float32)
    start = part * part_length
    end = tl.minimum(start + part_length, tokens)
    c_at = n_[:, None] * STRIDE + c_[None, :]
    r_at = n_[:, None] * STRIDE + C + r_[None, :]
    for n in tl.range(start, end, BN, num_stages=2):
        here_N = n_ < end - n
        rows_p = latent_p + n * STRIDE
        c_NC = tl.load(rows_p + c_at, mask=_inside(here_N, c_, C, BC), other=0.0)
        if not IN_CHUNKS:
            r_NR = tl.load(rows_p + r_at, mask=_inside(here_N, r_, R, BR), other=0.0)
            c_CN, r_RN = tl.trans(c_NC), tl.trans(r_NR)
        # Both conditions always hold. A region of its own sends the next tile's loads ahead of it,
        # and parts the scores' layout from the outputs': in one region every warp group would
        # compute all scores.
        if n < tokens:
            if n < end:
                if IN_CHUNKS:
                    rows_N = rows_p + n_ * STRIDE
                    s_HN = scale * _scores(q_at, rows_N, here_H1, here_N, C + R, BN, PRECISION)
                else:
                    s_HN = tl.dot(q_HC, c_CN, input_precision=PRECISION) * scale
                    s_HN += tl.dot(q_HR, r_RN, input_precision=PRECISION) * scale
                s_HN = tl.where(here_N[None, :], s_HN, float("-inf"))
                top_H = tl.maximum(highest_H, tl.max(s_HN, axis=1))
                s_HN = exp2(s_HN - top_H[:, None], PTX)
                sum_H = tl.sum(s_HN, axis=1)
                p_HN = s_HN.to(DTYPE)
            else:
                top_H, sum_H = highest_H, total_H
                p_HN = tl.full([BH, BN], scale, tl.float32).to(DTYPE)
            faded_H = exp2(highest_H - top_H, PTX)
            total_H = total_H * faded_H + sum_H
            o_HC = tl.dot(p_HN, c_NC, o_HC * faded_H[:, None], input_precision=PRECISION)
            highest_H = top_H
    o_HC *= (1.0 / total_H)[:, None]
    at_HC = (part * H + h_)[:, None] * C + c_[None, :]
    tl.store(partial_p + at_HC, o_HC, mask=here_H1 & (c_ < C)[None, :])
    tl.store(lse_p + part * H + h_, highest_H + tl.log2(total_H), mask=h_ < H)


@triton.jit
def _scores(
    q_at, rows_N, here_H1, here_N, WIDTH: tl.constexpr, BN: tl.constexpr, PRECISION: tl.constexpr
):
    """A few channels at a time: in fp32, queries of all channels would not fit the registers."""
    BK: tl.constexpr = 32
    s_HN = tl.zeros([here_H1.shape[0], BN], tl.float32)
    for first in range(0, WIDTH, BK):
        k_ = first + tl.arange(0, BK)
        q_HK = tl.load(q_at + k_[None, :], mask=here_H1 & (k_ < WIDTH)[None, :], other=0.0)
        here_KN = (k_ < WIDTH)[:, None] & here_N[None, :]
        x_KN = tl.load(rows_N[None, :] + k_[:, None], mask=here_KN, other=0.0)
        s_HN = tl.dot(q_HK, x_KN, s_HN, input_precision=PRECISION)
    return s_HN


@triton.jit
def _inside(here_N, c_, C: tl.constexpr, BC: tl.constexpr):
    if C == BC:
        return here_N[:, None]
    else:
        return here_N[:, None] & (c_ < C)[None, :]


@triton.jit(do_not_specialize=["parts"])
def _merge(
    partial_p,
    lse_p,
    o_p,
    parts,
    H: tl.constexpr,
    C: tl.constexpr,
    BC: tl.constexpr,
    BP: tl.constexpr,
    PTX: tl.constexpr,
):
    BLOCKS: tl.constexpr = (C + BC - 1) // BC
    h = tl.program_id(0) // BLOCKS
    c_ = (tl.program_id(0) % BLOCKS) * BC + tl.arange(0, BC)
    p_ = tl.arange(0, BP)
    lse_P = tl.load(lse_p + p_ * H + h, mask=p_ < parts, other=float("-inf"))
    weight_P = exp2(lse_P - tl.max(lse_P, axis=0), PTX)
    here_PC = (p_ < parts)[:, None] & (c_ < C)[None, :]
    at_PC = (p_ * H + h)[:, None] * C + c_[None, :]
    o_PC = tl.load(partial_p + at_PC, mask=here_PC, other=0.0)
    o_C = tl.sum(o_PC * weight_P[:, None], axis=0) / tl.sum(weight_P, axis=0)
    tl.store(o_p + h * C + c_, o_C.to(o_p.dtype.element_ty), mask=c_ < C)
