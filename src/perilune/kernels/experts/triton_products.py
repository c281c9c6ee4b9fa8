"""The experts' products straight from MXFP4: a program multiplies rows of weights by some tokens.

Legend: P pairs (in the experts' order), L expert input width, I intermediate width (padded to
whole tiles), T tokens, R experts a token; M weight rows, N and O tokens, K columns of a tile.

Weights are the left operand: their rows fill a tensor core's tile of 64 however few the tokens
are, and their values go from registers into the product. Only packed bytes cross the memory, in
pieces of 4 KB, several of them ahead.
"""

from __future__ import annotations

from math import gcd
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from perilune.kernels.common.triton_math import dot_precision, sigmoid, uses_ptx
from perilune.kernels.experts.tiles import COLUMNS, ROWS, SCALE_WORDS, WORDS
from perilune.kernels.experts.triton_decode import weights
from perilune.kernels.experts.triton_schedule import Plan, early, tokens_of_tile
from perilune.kernels.situ.triton_forward import capped, is_rounded


class Tile(NamedTuple):
    tokens: int
    row_tiles: int
    """Of 64 weight rows each, where a matrix has so many: one, two or four."""
    num_warps: int
    num_stages: int
    more: int = 0
    """So many of the tokens are multiplied apart from the rest: both are powers of two."""


TILES = {
    16: Tile(16, 2, 4, 4),
    32: Tile(32, 2, 4, 4),
    64: Tile(64, 2, 8, 3),
    96: Tile(96, 4, 8, 3, more=32),
    128: Tile(128, 2, 8, 3),
}
"""By their tokens. Two row tiles share what is read of the tokens; of many tokens, four."""
FP32_TILE = Tile(16, 1, 4, 1)
CROWDED = 64
"""Tokens an expert beyond which most would fill a second tile of as many."""


def tile_for(pairs: int, num_experts: int, dtype: torch.dtype) -> Tile:
    if dtype == torch.float32:
        return FP32_TILE
    if pairs > CROWDED * num_experts:
        return TILES[96]
    return TILES[tokens_of_tile(pairs, num_experts, CROWDED)]


def gate_up(
    x_TL: Tensor,
    plan: Plan,
    w13_EMKW: Tensor,
    wide: bool,
    caps: tuple[float | None, float | None],
    tile: Tile,
) -> Tensor:
    """glu(w13 x) of every pair, [P, I]."""
    pairs, active = plan.place_TR.numel(), plan.place_TR.shape[1]
    hidden_PI = x_TL.new_empty(pairs, w13_EMKW.shape[1] * ROWS // 2)
    _launch(x_TL, plan.pair_P, plan.tile_I3, active, w13_EMKW, wide, caps, tile, hidden_PI)
    return hidden_PI


def down(
    hidden_PI: Tensor, tile_I3: Tensor, w2_EMKW: Tensor, wide: bool, width: int, tile: Tile
) -> Tensor:
    """w2 hidden of every pair, fp32 [P, L]."""
    out_PL = hidden_PI.new_empty(hidden_PI.shape[0], width, dtype=torch.float32)
    _launch(hidden_PI, None, tile_I3, 1, w2_EMKW, wide, None, tile, out_PL)
    return out_PL


def _launch(
    x: Tensor,
    pair_P: Tensor | None,
    tile_I3: Tensor,
    active: int,
    w_EMKW: Tensor,
    wide: bool,
    caps: tuple[float | None, float | None] | None,
    tile: Tile,
    y: Tensor,
) -> None:
    row_tiles = gcd(tile.row_tiles, w_EMKW.shape[1])
    programs = w_EMKW.shape[1] // row_tiles
    beta, linear_beta = (None, None) if caps is None else caps
    _product[(programs * tile_I3.shape[0],)](
        x,
        pair_P,
        tile_I3,
        w_EMKW,
        y,
        x.stride(0),
        beta,
        linear_beta,
        ACTIVE=active,
        WIDTH=x.shape[1],
        OUT=y.shape[1],
        COLUMN_TILES=w_EMKW.shape[2],
        PROGRAMS=programs,
        BM=row_tiles,
        BN=tile.tokens - tile.more,
        MORE=tile.more,
        BK=COLUMNS,
        WORDS=WORDS,
        SCALE_WORDS=SCALE_WORDS,
        GATED=caps is not None,
        WIDE=wide,
        PRECISION=dot_precision(x.dtype),
        PTX=uses_ptx(x.device),
        FAST=is_rounded(x),
        STAGES=tile.num_stages,
        num_warps=tile.num_warps,
        **early(x.device),
    )


@triton.jit
def _product(
    x_p,
    pair_p,
    tile_p,
    w_p,
    y_p,
    x_stride,
    beta,
    linear_beta,
    ACTIVE: tl.constexpr,
    WIDTH: tl.constexpr,
    OUT: tl.constexpr,
    COLUMN_TILES: tl.constexpr,
    PROGRAMS: tl.constexpr,
    BM: tl.constexpr,
    BN: tl.constexpr,
    MORE: tl.constexpr,
    BK: tl.constexpr,
    WORDS: tl.constexpr,
    SCALE_WORDS: tl.constexpr,
    GATED: tl.constexpr,
    WIDE: tl.constexpr,
    PRECISION: tl.constexpr,
    PTX: tl.constexpr,
    FAST: tl.constexpr,
    STAGES: tl.constexpr,
    EARLY: tl.constexpr,
):
    if EARLY:
        gdc_wait()
        gdc_launch_dependents()
    # Programs of one expert are neighbours: its tokens, and for its next tile its weights, are in
    # the L2 then.
    tile_at = tile_p + (tl.program_id(0) // PROGRAMS) * 3
    rows = tl.program_id(0) % PROGRAMS
    expert = tl.load(tile_at)
    if expert < 0:
        return
    n_, here_N, row_N = tokens(tile_at, pair_p, ACTIVE, BN, 0)
    k_ = tl.arange(0, BK)
    x_at = x_p + row_N[:, None] * x_stride + k_[None, :]
    TILE: tl.constexpr = WORDS + SCALE_WORDS
    m_ = (expert.to(tl.int64) * PROGRAMS + rows) * BM + tl.arange(0, BM)
    w_at = w_p + (m_ * (COLUMN_TILES * TILE))[:, None]
    s_at = w_at + WORDS + tl.arange(0, SCALE_WORDS)[None, :]
    w_at += tl.arange(0, WORDS)[None, :]
    acc_MN = tl.zeros([BM * 64, BN], tl.float32)
    BO: tl.constexpr = MORE if MORE else BN
    more_, here_O, row_O = tokens(tile_at, pair_p, ACTIVE, BO, BN)
    more_at = x_p + row_O[:, None] * x_stride + k_[None, :]
    acc_MO = tl.zeros([BM * 64, BO], tl.float32)
    for k in tl.range(0, COLUMN_TILES, num_stages=STAGES):
        x_NK = _columns(x_at, here_N, k, WIDTH, BK)
        words = tl.load(w_at + k * TILE)
        scales = tl.load(s_at + k * TILE)
        w_MK = weights(words, scales, x_p.dtype.element_ty, WIDE, PTX)
        acc_MN = tl.dot(w_MK, tl.trans(x_NK), acc_MN, input_precision=PRECISION)
        if MORE:
            x_OK = _columns(more_at, here_O, k, WIDTH, BK)
            acc_MO = tl.dot(w_MK, tl.trans(x_OK), acc_MO, input_precision=PRECISION)
    finish(acc_MN, y_p, n_, here_N, rows, beta, linear_beta, OUT, GATED, PTX, FAST)
    if MORE:
        finish(acc_MO, y_p, more_, here_O, rows, beta, linear_beta, OUT, GATED, PTX, FAST)


@triton.jit
def _columns(x_at, here_N, k, WIDTH: tl.constexpr, BK: tl.constexpr):
    """A column tile of the tokens."""
    here_NK = here_N[:, None]
    if WIDTH % BK != 0:
        here_NK = here_NK & (tl.arange(0, BK) < WIDTH - k * BK)[None, :]
    return tl.load(x_at + k * BK, mask=here_NK, other=0.0)


@triton.jit
def tokens(tile_at, pair_p, ACTIVE: tl.constexpr, BN: tl.constexpr, FIRST: tl.constexpr):
    """Places from a tile's `FIRST`, which of them are there, and the row of x (int64) of each,
    which so many share."""
    n_ = tl.load(tile_at + 1) + FIRST + tl.arange(0, BN)
    here_N = n_ < tl.load(tile_at + 2)
    pair_N = n_
    if pair_p is not None:
        pair_N = tl.load(pair_p + n_, mask=here_N, other=0)
    return n_, here_N, (pair_N // ACTIVE).to(tl.int64)


@triton.jit
def finish(
    acc_MN,
    y_p,
    n_,
    here_N,
    rows,
    beta,
    linear_beta,
    OUT: tl.constexpr,
    GATED: tl.constexpr,
    PTX: tl.constexpr,
    FAST: tl.constexpr,
):
    """Stores a tile's outputs or, of gate and up rows, their GLU."""
    if GATED:
        y_MN = _glu(acc_MN, beta, linear_beta, PTX, FAST)
    else:
        y_MN = acc_MN
    BO: tl.constexpr = y_MN.shape[0]
    o_ = rows * BO + tl.arange(0, BO)
    y_at = y_p + n_.to(tl.int64)[:, None] * OUT + o_[None, :]
    y_NM = tl.trans(y_MN).to(y_p.dtype.element_ty)
    tl.store(y_at, y_NM, mask=here_N[:, None] & (o_ < OUT)[None, :])


@triton.jit
def _glu(acc_MN, beta, linear_beta, PTX: tl.constexpr, FAST: tl.constexpr):
    """Gate and up rows alternate in runs of 8."""
    M: tl.constexpr = acc_MN.shape[0]
    N: tl.constexpr = acc_MN.shape[1]
    gate, up = tl.split(acc_MN.reshape(M // 16, 2, 8, N).permute(0, 2, 3, 1))
    up_u, _ = capped(up, linear_beta, PTX, FAST)
    linear, _ = capped(gate, beta, PTX, FAST)
    return (linear * sigmoid(gate, PTX) * up_u).reshape(M // 2, N)
