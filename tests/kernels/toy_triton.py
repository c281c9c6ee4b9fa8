"""A small op in Triton, right or with one of its faults: a decayed running sum of normalised rows.

s_t = 0.99 s_(t-1) + x_t / (1 + sum |x_t|), y_t = weight s_t. Legend: T packed tokens, N sequences,
D width, S slots of the pool. `FAULT` is constant in a kernel: 0 is none.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

DECAY = 0.99
CONFIGS = [{"block": 8}, {"block": 16}]

FORWARD_FAULTS = (
    "",
    "row_unmasked",
    "reads_behind",
    "contiguous_assumed",
    "seventeenth_unwritten",
    "writes_past_the_end",
    "sees_the_next_token",
    "neighbour_s_state",
    "state_of_a_full_tile",
    "sequences_joined",
    "history_of_32",
    "state_never_read",
    "wide_block_wrong",
    "nan_crosses",
)
STEP_FAULTS = (
    "",
    "slot_ignored",
    "next_slot_written",
    "padding_writes",
    "pool_contiguous_assumed",
    "state_in_bf16",
    "drafts_always_kept",
)


@triton.jit
def _normalised(x_ptr, offset, o_D, mask_D):
    x_D = tl.load(x_ptr + offset + o_D, mask=mask_D, other=0.0)
    return x_D / (1.0 + tl.sum(tl.abs(x_D), axis=0))


@triton.jit
def _forward_kernel(
    x_ptr, weight_ptr, state_ptr, start_ptr, y_ptr, after_ptr, width, x_stride, y_stride, total,
    BLOCK: tl.constexpr, HAS_STATE: tl.constexpr, FAULT: tl.constexpr,
):  # fmt: skip
    i_n = tl.program_id(0)
    o_D = tl.arange(0, BLOCK)
    mask_D = o_D < width
    start, end = tl.load(start_ptr + i_n), tl.load(start_ptr + i_n + 1)
    weight_D = tl.load(weight_ptr + o_D, mask=mask_D, other=0.0)
    s_D = tl.zeros([BLOCK], tl.float32)
    if HAS_STATE and FAULT != 11:
        row = i_n + 1 if FAULT == 7 and i_n + 1 < tl.num_programs(0) else i_n
        s_D = tl.load(state_ptr + row * width + o_D, mask=mask_D, other=0.0)
    if FAULT == 9 and i_n > 0:
        start = tl.load(start_ptr + i_n - 1)
    full_D = s_D
    for t in range(start, end):
        lanes_D = o_D < BLOCK if FAULT == 1 else mask_D
        u_D = _normalised(x_ptr, t * x_stride, o_D, lanes_D)
        if FAULT == 2:
            u_D += 0.0 * tl.load(x_ptr + (t + 1) * x_stride + o_D, mask=mask_D, other=0.0)
        if FAULT == 6 and t + 1 < end:
            u_D += 1e-3 * tl.load(x_ptr + (t + 1) * x_stride + o_D, mask=mask_D, other=0.0)
        if FAULT == 10 and t - start >= 32:
            s_D -= 0.99**31 * _normalised(x_ptr, (t - 32) * x_stride, o_D, mask_D)
        if FAULT == 13:
            u_D += 0.0 * tl.load(x_ptr + (total - 1) * x_stride + o_D, mask=mask_D, other=0.0)
        s_D = 0.99 * s_D + u_D
        if FAULT == 8 and t - start < (end - start) // 16 * 16:
            full_D = s_D
        if FAULT == 12 and BLOCK > 8:
            s_D *= 1.001
        if not (FAULT == 4 and end - start == 17 and t == end - 1):
            tl.store(y_ptr + t * y_stride + o_D, weight_D * s_D, mask=mask_D)
    if FAULT == 5:
        tl.store(y_ptr + total * y_stride + o_D, s_D, mask=mask_D)
    if FAULT == 8 and end - start > 16:
        s_D = full_D
    tl.store(after_ptr + i_n * width + o_D, s_D, mask=mask_D)


@triton.jit
def _step_kernel(
    x_ptr, weight_ptr, pool_ptr, slot_ptr, keep_ptr, y_ptr, width, length, x_stride, pool_stride,
    BLOCK: tl.constexpr, HAS_KEEP: tl.constexpr, FAULT: tl.constexpr,
):  # fmt: skip
    i_n = tl.program_id(0)
    o_D = tl.arange(0, BLOCK)
    mask_D = o_D < width
    slot = tl.load(slot_ptr + i_n)
    if FAULT == 1:
        slot = slot * 0 + i_n
    keep = length
    if HAS_KEEP and FAULT != 6:
        keep = tl.load(keep_ptr + i_n)
    stored = slot + 1 if FAULT == 2 else slot
    if slot >= 0:
        s_D = tl.load(pool_ptr + slot * pool_stride + o_D, mask=mask_D, other=0.0)
        weight_D = tl.load(weight_ptr + o_D, mask=mask_D, other=0.0)
        for i in range(length):
            t = i_n * length + i
            s_D = 0.99 * s_D + _normalised(x_ptr, t * x_stride, o_D, mask_D)
            if FAULT == 5:
                s_D = s_D.to(tl.float16).to(tl.float32)
            tl.store(y_ptr + t * width + o_D, weight_D * s_D, mask=mask_D)
            if i + 1 == keep:
                tl.store(pool_ptr + stored * pool_stride + o_D, s_D, mask=mask_D)
    elif FAULT == 3:
        tl.store(pool_ptr + o_D, tl.zeros([BLOCK], tl.float32), mask=mask_D)


def forward(x_TD, weight_D, packing, state_ND=None, *, block=8, fault=""):
    """(y_TD, state_ND); rows of x may be strided."""
    x_TD = x_TD if x_TD.stride(-1) == 1 else x_TD.contiguous()
    width, number = x_TD.shape[1], FORWARD_FAULTS.index(fault)
    y_TD = torch.empty(x_TD.shape, dtype=x_TD.dtype)
    after_ND = torch.empty(packing.num_sequences, width)
    starts = torch.tensor(packing.cu_seqlens)
    state = None if state_ND is None else state_ND.float().contiguous()
    stride = width if number == 3 else x_TD.stride(0)
    _forward_kernel[(packing.num_sequences,)](
        x_TD, weight_D.contiguous(), after_ND if state is None else state, starts, y_TD, after_ND,
        width, stride, width, x_TD.shape[0],
        BLOCK=block, HAS_STATE=state is not None, FAULT=number,
    )  # fmt: skip
    return y_TD, after_ND


def step(x_TD, weight_D, pool_SD, slot_N, keep_N=None, *, block=8, fault=""):
    """y_TD of L = T / N tokens a sequence; their states are kept in the pool."""
    n, number = slot_N.shape[0], STEP_FAULTS.index(fault)
    width = pool_SD.shape[1]
    x_TD = x_TD.contiguous()
    y_TD = torch.zeros(x_TD.shape)
    pool = pool_SD if pool_SD.stride(-1) == 1 else pool_SD.contiguous()
    if n:
        _step_kernel[(n,)](
            x_TD, weight_D.contiguous(), pool, slot_N.contiguous(),
            slot_N if keep_N is None else keep_N.contiguous(), y_TD,
            width, x_TD.shape[0] // n, width, width if number == 4 else pool.stride(0),
            BLOCK=block, HAS_KEEP=keep_N is not None, FAULT=number,
        )  # fmt: skip
    if pool is not pool_SD:
        pool_SD.copy_(pool)
    return y_TD
