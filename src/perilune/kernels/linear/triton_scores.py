"""The product of few tokens with a router's weight, at fp32's precision on bf16's tensor cores.

Legend: T tokens, I input columns, O output rows, S splits of the columns, K columns of a step.

A number of fp32 is the sum of three of bf16, exactly: 24 bits in three times eight. Products of
bf16 numbers are exact in fp32, so that the sum over those parts that matter, smallest first, is
what fp32 would give. The parts are made in registers: memory gives the weight once, as it is
stored. Splits and their order depend on the weight's shape alone, and a row of the result on its
own token: it has the same bits in every batch.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from perilune.kernels.common.triton_math import launches_early

ROWS, COLUMNS = 64, 64
"""Of the weight, in a step: tiles of Hopper's tensor cores are 64 rows high."""
PROGRAMS = 132
"""About as many read the weight, as many as the target has multiprocessors; a constant, so that
another card adds up in the same order."""
WIDEST = 64
"""Tokens of a tile: with more of them, the accumulators leave no room for a second program."""
SHARED_BYTES, MOST_STAGES = 110 << 10, 8
"""What two programs of a multiprocessor have of its memory each, and the steps in it."""
SUM_BLOCK = 128


def scores(x_TI: Tensor, weight_OI: Tensor) -> Tensor:
    """x W^T in fp32, [T, O], of bf16 or fp32 with rows in one piece."""
    (t, i), o = x_TI.shape, weight_OI.shape[0]
    row_tiles = triton.cdiv(o, ROWS)
    steps, splits = splits_of(i, row_tiles)
    y_TO = x_TI.new_empty(t, o, dtype=torch.float32)
    if y_TO.numel() == 0:
        return y_TO
    part_STO = y_TO if splits == 1 else y_TO.new_empty(splits, t, o)
    tokens = min(WIDEST, max(16, triton.next_power_of_2(t)))
    step_bytes = COLUMNS * (ROWS * weight_OI.element_size() + tokens * x_TI.element_size())
    options = early(x_TI.device)
    _product[(row_tiles, splits, triton.cdiv(t, tokens))](
        x_TI,
        weight_OI,
        part_STO,
        t,
        x_TI.stride(0),
        weight_OI.stride(0),
        WIDTH=i,
        OUT=o,
        STEPS=steps,
        BT=tokens,
        BO=ROWS,
        BK=COLUMNS,
        X_PARTS=num_parts(x_TI),
        WEIGHT_PARTS=num_parts(weight_OI),
        # The interpreter multiplies the bit patterns of bf16 numbers.
        DTYPE=tl.bfloat16 if x_TI.is_cuda else tl.float32,
        STAGES=min(MOST_STAGES, SHARED_BYTES // step_bytes),
        num_warps=4,
        **options,
    )
    if splits > 1:
        _sum[(triton.cdiv(t * o, SUM_BLOCK),)](
            part_STO, y_TO, t * o, SPLITS=splits, BLOCK=SUM_BLOCK, num_warps=4, **options
        )
    return y_TO


class Splits(NamedTuple):
    steps: int
    """Of a split; the last one may have fewer."""
    count: int


def splits_of(width: int, row_tiles: int) -> Splits:
    """Of the columns, so that about PROGRAMS read the weight."""
    all_steps = triton.cdiv(width, COLUMNS)
    steps = triton.cdiv(all_steps, max(1, PROGRAMS // row_tiles))
    return Splits(steps, triton.cdiv(all_steps, steps))


def early(device: torch.device) -> dict[str, Any]:
    """Options of a kernel that is set up while the one before it ends."""
    return {"EARLY": True, "launch_pdl": True} if launches_early(device) else {"EARLY": False}


def num_parts(x: Tensor) -> int:
    return 1 if x.dtype == torch.bfloat16 else 3


@triton.jit
def _product(
    x_p,
    weight_p,
    part_p,
    num_tokens,
    x_stride,
    weight_stride,
    WIDTH: tl.constexpr,
    OUT: tl.constexpr,
    STEPS: tl.constexpr,
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
    split = tl.program_id(1)
    o_ = tl.program_id(0) * BO + tl.arange(0, BO)
    t_ = tl.program_id(2) * BT + tl.arange(0, BT)
    k_ = tl.arange(0, BK)
    here_O1 = (o_ < OUT)[:, None]
    here_T1 = (t_ < num_tokens)[:, None]
    weight_at = weight_p + o_.to(tl.int64)[:, None] * weight_stride + k_[None, :]
    x_at = x_p + t_.to(tl.int64)[:, None] * x_stride + k_[None, :]
    acc_OT = of_split(
        weight_at, x_at, here_O1, here_T1, split, WIDTH, STEPS, BK, WEIGHT_PARTS, X_PARTS, DTYPE,
        STAGES,
    )  # fmt: skip
    part_at = part_p + (split.to(tl.int64) * num_tokens + t_)[:, None] * OUT + o_[None, :]
    tl.store(part_at, tl.trans(acc_OT), mask=here_T1 & (o_ < OUT)[None, :])


@triton.jit
def of_split(
    weight_at,
    x_at,
    here_O1,
    here_T1,
    split,
    WIDTH: tl.constexpr,
    STEPS: tl.constexpr,
    BK: tl.constexpr,
    WEIGHT_PARTS: tl.constexpr,
    X_PARTS: tl.constexpr,
    DTYPE: tl.constexpr,
    STAGES: tl.constexpr,
):
    """W x^T over the columns of a split."""
    k_ = tl.arange(0, BK)
    acc_OT = tl.zeros([here_O1.shape[0], here_T1.shape[0]], tl.float32)
    first = split * STEPS * BK
    for k in tl.range(first, tl.minimum(first + STEPS * BK, WIDTH), BK, num_stages=STAGES):
        here_OK, here_TK = here_O1, here_T1
        if WIDTH % BK != 0:
            here_1K = (k_ < WIDTH - k)[None, :]
            here_OK, here_TK = here_O1 & here_1K, here_T1 & here_1K
        weight_OK = tl.load(weight_at + k, mask=here_OK, other=0.0)
        x_TK = tl.load(x_at + k, mask=here_TK, other=0.0)
        acc_OT = _times(weight_OK, x_TK, acc_OT, WEIGHT_PARTS, X_PARTS, DTYPE)
    return acc_OT


@triton.jit
def _times(
    weight_OK,
    x_TK,
    acc_OT,
    WEIGHT_PARTS: tl.constexpr,
    X_PARTS: tl.constexpr,
    DTYPE: tl.constexpr,
):
    """acc + W x^T. Products of parts that are 2^-24 of the whole, and less, are left out."""
    weights = _parts(weight_OK, WEIGHT_PARTS, DTYPE)
    tokens = _parts(x_TK, X_PARTS, DTYPE)
    for level in tl.static_range(3):
        for i in tl.static_range(WEIGHT_PARTS):
            for j in tl.static_range(X_PARTS):
                if i + j == 2 - level:
                    acc_OT = tl.dot(weights[i], tl.trans(tokens[j]), acc_OT, input_precision="ieee")
    return acc_OT


@triton.jit
def _parts(x, PARTS: tl.constexpr, DTYPE: tl.constexpr):
    """Numbers of bf16 whose sum is x, exactly, the largest first."""
    if PARTS == 1:
        return (x.to(DTYPE),)
    else:
        high = _rounded(x.to(tl.float32))
        rest = x.to(tl.float32) - high
        middle = _rounded(rest)
        return high.to(DTYPE), middle.to(DTYPE), (rest - middle).to(DTYPE)


@triton.jit
def _rounded(x):
    """The nearest number of bf16, in fp32."""
    bits = x.to(tl.int32, bitcast=True) + 0x8000
    return (bits & -65536).to(tl.float32, bitcast=True)


@triton.jit
def _sum(part_p, y_p, num_elements, SPLITS: tl.constexpr, BLOCK: tl.constexpr, EARLY: tl.constexpr):
    """Of the splits, in their order."""
    if EARLY:
        gdc_wait()
        gdc_launch_dependents()
    n_ = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    here = n_ < num_elements
    y = tl.zeros([BLOCK], tl.float32)
    for split in tl.static_range(SPLITS):
        y += tl.load(part_p + split * num_elements + n_, mask=here, other=0.0)
    tl.store(y_p + n_, y, mask=here)
