"""The same product of many tokens, bit for bit: splits of the columns added up where they are made.

Legend: as in `triton_scores`.

There are programs enough without splitting the columns, and parts of every split would be more
bytes than all else. So a program sums up one split after the other, and adds their sums in the
order in which `triton_scores` does: a token has the bits that it has among few others.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from perilune.kernels.linear.triton_scores import (
    COLUMNS,
    ROWS,
    early,
    num_parts,
    of_split,
    splits_of,
)

LARGE_FROM = 2048
"""With more tokens, large tiles too are enough for every multiprocessor."""
MOST_STAGES = 4


class Tile(NamedTuple):
    rows: int
    tokens: int
    warps: int
    shared_bytes: int
    """For steps under way: half, or most, of a multiprocessor's."""


def tile_of(tokens: int, products: int) -> Tile:
    """Both sums of a large tile of 128 tokens fill the registers, or of 64 and the parts of numbers
    that take `products` each."""
    if tokens <= LARGE_FROM and products <= 3:
        return Tile(64, 64, 4, 96 << 10)
    return Tile(128, 128 if products == 1 else 64, 8, 160 << 10)


def scores(x_TI: Tensor, weight_OI: Tensor, tile: Tile | None = None) -> Tensor:
    """x W^T in fp32, [T, O], of bf16 or fp32 with rows in one piece."""
    (t, i), o = x_TI.shape, weight_OI.shape[0]
    parts = num_parts(x_TI), num_parts(weight_OI)
    if tile is None:
        tile = tile_of(t, parts[0] * parts[1])
    steps, splits = splits_of(i, triton.cdiv(o, ROWS))
    y_TO = x_TI.new_empty(t, o, dtype=torch.float32)
    if y_TO.numel() == 0:
        return y_TO
    sizes = tile.rows * weight_OI.element_size() + tile.tokens * x_TI.element_size()
    _whole[(triton.cdiv(o, tile.rows), triton.cdiv(t, tile.tokens))](
        x_TI,
        weight_OI,
        y_TO,
        t,
        x_TI.stride(0),
        weight_OI.stride(0),
        WIDTH=i,
        OUT=o,
        STEPS=steps,
        SPLITS=splits,
        BT=tile.tokens,
        BO=tile.rows,
        BK=COLUMNS,
        X_PARTS=parts[0],
        WEIGHT_PARTS=parts[1],
        DTYPE=tl.bfloat16 if x_TI.is_cuda else tl.float32,
        STAGES=min(MOST_STAGES, tile.shared_bytes // (COLUMNS * sizes)),
        num_warps=tile.warps,
        **early(x_TI.device),
    )
    return y_TO


@triton.jit
def _whole(
    x_p,
    weight_p,
    y_p,
    num_tokens,
    x_stride,
    weight_stride,
    WIDTH: tl.constexpr,
    OUT: tl.constexpr,
    STEPS: tl.constexpr,
    SPLITS: tl.constexpr,
    BT: tl.constexpr,
    BO: tl.constexpr,
    BK: tl.constexpr,
    X_PARTS: tl.constexpr,
    WEIGHT_PARTS: tl.constexpr,
    DTYPE: tl.constexpr,
    STAGES: tl.constexpr,
    EARLY: tl.constexpr,
):
    if EARLY:
        gdc_wait()
        gdc_launch_dependents()
    o_ = tl.program_id(0) * BO + tl.arange(0, BO)
    t_ = tl.program_id(1).to(tl.int64) * BT + tl.arange(0, BT)
    k_ = tl.arange(0, BK)
    here_O1 = (o_ < OUT)[:, None]
    here_T1 = (t_ < num_tokens)[:, None]
    weight_at = weight_p + o_.to(tl.int64)[:, None] * weight_stride + k_[None, :]
    x_at = x_p + t_[:, None] * x_stride + k_[None, :]
    y_OT = tl.zeros([BO, BT], tl.float32)
    for split in range(SPLITS):
        y_OT += of_split(
            weight_at, x_at, here_O1, here_T1, split, WIDTH, STEPS, BK, WEIGHT_PARTS, X_PARTS,
            DTYPE, STAGES,
        )  # fmt: skip
    y_at = y_p + t_[:, None] * OUT + o_[None, :]
    tl.store(y_at, tl.trans(y_OT), mask=here_T1 & (o_ < OUT)[None, :])
