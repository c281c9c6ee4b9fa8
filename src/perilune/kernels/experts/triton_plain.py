"""The experts' products of bf16 or fp32 weights, as `triton_products` has those of MXFP4.

Legend: P pairs (in the experts' order), E experts, L expert input width, I intermediate width; M
weight rows, N tokens, K columns of a tile.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from perilune.kernels.common.triton_math import dot_precision, uses_ptx
from perilune.kernels.experts.triton_products import finish, tokens
from perilune.kernels.experts.triton_schedule import Plan, early, tokens_of_tile
from perilune.kernels.situ.triton_forward import is_rounded


class Tile(NamedTuple):
    tokens: int
    rows: int
    columns: int
    num_warps: int
    num_stages: int


TILES = {
    16: Tile(16, 128, 64, 4, 5),
    32: Tile(32, 128, 64, 4, 5),
    64: Tile(64, 128, 64, 4, 4),
    128: Tile(128, 128, 64, 8, 4),
}
"""By their tokens."""
FP32_TILE = Tile(16, 64, 32, 4, 2)


def plain_tile_for(pairs: int, num_experts: int, dtype: torch.dtype) -> Tile:
    return FP32_TILE if dtype == torch.float32 else TILES[tokens_of_tile(pairs, num_experts)]


def plain_gate_up(
    x_TL: Tensor,
    plan: Plan,
    w13_E2IL: Tensor,
    caps: tuple[float | None, float | None],
    tile: Tile,
) -> Tensor:
    """glu(w13 x) of every pair, [P, I]."""
    pairs, active = plan.place_TR.numel(), plan.place_TR.shape[1]
    hidden_PI = x_TL.new_empty(pairs, w13_E2IL.shape[1] // 2)
    _launch(x_TL, plan.pair_P, plan.tile_I3, active, w13_E2IL, caps, tile, hidden_PI)
    return hidden_PI


def plain_down(hidden_PI: Tensor, tile_I3: Tensor, w2_ELI: Tensor, tile: Tile) -> Tensor:
    """w2 hidden of every pair, fp32 [P, L]."""
    out_PL = hidden_PI.new_empty(hidden_PI.shape[0], w2_ELI.shape[1], dtype=torch.float32)
    _launch(hidden_PI, None, tile_I3, 1, w2_ELI, None, tile, out_PL)
    return out_PL


def _launch(
    x: Tensor,
    pair_P: Tensor | None,
    tile_I3: Tensor,
    active: int,
    w_EOI: Tensor,
    caps: tuple[float | None, float | None] | None,
    tile: Tile,
    y: Tensor,
) -> None:
    programs = triton.cdiv(w_EOI.shape[1], tile.rows)
    beta, linear_beta = (None, None) if caps is None else caps
    _plain_product[(programs * tile_I3.shape[0],)](
        x,
        pair_P,
        tile_I3,
        w_EOI,
        y,
        x.stride(0),
        beta,
        linear_beta,
        ACTIVE=active,
        WIDTH=x.shape[1],
        ROWS=w_EOI.shape[1],
        OUT=y.shape[1],
        PROGRAMS=programs,
        BM=tile.rows,
        BN=tile.tokens,
        BK=tile.columns,
        GATED=caps is not None,
        PRECISION=dot_precision(x.dtype),
        PTX=uses_ptx(x.device),
        FAST=is_rounded(x),
        STAGES=tile.num_stages,
        num_warps=tile.num_warps,
        **early(x.device),
    )


@triton.jit
def _plain_product(
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
    ROWS: tl.constexpr,
    OUT: tl.constexpr,
    PROGRAMS: tl.constexpr,
    BM: tl.constexpr,
    BN: tl.constexpr,
    BK: tl.constexpr,
    GATED: tl.constexpr,
    PRECISION: tl.constexpr,
    PTX: tl.constexpr,
    FAST: tl.constexpr,
    STAGES: tl.constexpr,
    EARLY: tl.constexpr,
):
    if EARLY:
        gdc_wait()
        gdc_launch_dependents()
    tile_at = tile_p + (tl.program_id(0) // PROGRAMS) * 3
    rows = tl.program_id(0) % PROGRAMS
    expert = tl.load(tile_at)
    if expert < 0:
        return
    n_, here_N, row_N = tokens(tile_at, pair_p, ACTIVE, BN, 0)
    m_, k_ = tl.arange(0, BM), tl.arange(0, BK)
    if GATED:
        # Gate and up rows alternate in runs of 8, as `finish` wants them.
        o_ = rows * (BM // 2) + (m_ // 16) * 8 + m_ % 8
        here_M = o_ < ROWS // 2
        o_ += (m_ // 8) % 2 * (ROWS // 2)
    else:
        o_ = rows * BM + m_
        here_M = o_ < ROWS
    x_at = x_p + row_N[:, None] * x_stride + k_[None, :]
    w_at = w_p + (expert.to(tl.int64) * ROWS + o_)[:, None] * WIDTH + k_[None, :]
    acc_MN = tl.zeros([BM, BN], tl.float32)
    for k in tl.range(0, tl.cdiv(WIDTH, BK), num_stages=STAGES):
        here_NK, here_MK = here_N[:, None], here_M[:, None]
        if WIDTH % BK != 0:
            here_1K = (k_ < WIDTH - k * BK)[None, :]
            here_NK, here_MK = here_NK & here_1K, here_MK & here_1K
        x_NK = tl.load(x_at + k * BK, mask=here_NK, other=0.0)
        w_MK = tl.load(w_at + k * BK, mask=here_MK, other=0.0).to(x_NK.dtype)
        acc_MN = tl.dot(w_MK, tl.trans(x_NK), acc_MN, input_precision=PRECISION)
    finish(acc_MN, y_p, n_, here_N, rows, beta, linear_beta, OUT, GATED, PTX, FAST)
