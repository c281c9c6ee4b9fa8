"""Gradients of expanded prefill, with scores computed again from the log-sums of forward.

Legend: T queries, S keys, H heads, K query width = N own + R shared key channels, V value width,
I tiles; M queries and S keys of a tile.

A program sums the gradient of a tile of queries over its keys, another one that of a tile of keys
over its queries: nothing is added in memory, and the result is the same bits every time.

```
p = 2^(s - lse)    dv = p^T do    ds = p (do v^T - sum_V(o do)) scale    dq = ds k    dk = ds^T q
```
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from perilune.kernels.common.triton_math import LOG2_E, exp2
from perilune.kernels.mla.triton_prefill_forward import (
    Attended,
    Operands,
    Tile,
    inside,
    rows,
    scores,
)
from perilune.kernels.mla.triton_prefill_table import Documents, Tiles


class Gradients(NamedTuple):
    q_THK: Tensor
    k_SHN: Tensor
    shared_SR: Tensor
    """fp32."""
    v_SHV: Tensor


QUERY_TILE = Tile(128, 64, 8, 2)
KEY_TILE = Tile(32, 128, 8, 3)
FP32_QUERY_TILE = Tile(32, 32, 8, 2)
FP32_KEY_TILE = Tile(32, 32, 8, 2)


def tiles_of(dtype: torch.dtype) -> tuple[Tile, Tile]:
    """For the gradients of queries, and of keys."""
    if dtype == torch.float32:
        return FP32_QUERY_TILE, FP32_KEY_TILE
    return QUERY_TILE, KEY_TILE


def backward(
    x: Operands, out: Attended, do_THV: Tensor, table: Tiles, documents: Documents | None
) -> Gradients:
    """`table` is of tiles of as many queries, and keys, as `tiles_of` says."""
    (t, h, k), (s, _, n), r = x.q_THK.shape, x.k_SHN.shape, x.shared_SR.shape[1]
    of_queries, of_keys = tiles_of(x.q_THK.dtype)
    dq_THK, dk_SHN = x.q_THK.new_empty(t, h, k), x.q_THK.new_empty(s, h, n)
    dv_SHV = x.q_THK.new_empty(x.v_SHV.shape)
    dr_SHR = x.q_THK.new_empty(s, h, r, dtype=torch.float32)
    delta_HT = torch.empty_like(out.lse_HT)
    first = table.query_I4 if documents is None else documents.first_T
    end = table.query_I4 if documents is None else documents.end_T
    shared = {"DOCUMENTS": documents is not None, **x.sizes, **x.settings}
    places = (*x.strides, *do_THV.stride()[:2])
    floats = x.scale * LOG2_E.value, x.scale
    if t:
        _queries[(len(table.query_I4) * h,)](
            *x[:4],
            *out,
            do_THV,
            delta_HT,
            dq_THK,
            table.query_I4,
            first,
            *places,
            len(table.query_I4),
            t,
            *floats,
            BM=of_queries.queries,
            BS=of_queries.keys,
            STAGES=of_queries.stages,
            **shared,
            num_warps=of_queries.num_warps,
        )
    if s:
        _keys[(len(table.key_I5) * h,)](
            *x[:4],
            out.lse_HT,
            do_THV,
            delta_HT,
            dk_SHN,
            dr_SHR,
            dv_SHV,
            table.key_I5,
            first,
            end,
            *places,
            len(table.key_I5),
            t,
            *floats,
            BM=of_keys.queries,
            BS=of_keys.keys,
            STAGES=of_keys.stages,
            **shared,
            num_warps=of_keys.num_warps,
        )
    return Gradients(dq_THK, dk_SHN, dr_SHR.sum(1), dv_SHV)


@triton.jit(do_not_specialize=["num_tiles", "num_queries"])
def _queries(
    q_p,
    k_p,
    r_p,
    v_p,
    o_p,
    lse_p,
    do_p,
    delta_p,
    dq_p,
    query_p,
    first_p,
    q_stride,
    q_head,
    k_stride,
    k_head,
    r_stride,
    v_stride,
    v_head,
    do_stride,
    do_head,
    num_tiles,
    num_queries,
    scale,
    unit,
    H: tl.constexpr,
    N: tl.constexpr,
    R: tl.constexpr,
    V: tl.constexpr,
    BN: tl.constexpr,
    BR: tl.constexpr,
    BV: tl.constexpr,
    BM: tl.constexpr,
    BS: tl.constexpr,
    DOCUMENTS: tl.constexpr,
    STAGES: tl.constexpr,
    PRECISION: tl.constexpr,
    PTX: tl.constexpr,
):
    head = (tl.program_id(0) // num_tiles).to(tl.int64)
    tile_p = query_p + (tl.program_id(0) % num_tiles) * 4
    q0, q_end = tl.load(tile_p), tl.load(tile_p + 1)
    low, shift = tl.load(tile_p + 2), tl.load(tile_p + 3)
    m_, s_ = tl.arange(0, BM), tl.arange(0, BS)
    here_M = m_ < q_end - q0
    wide = q0.to(tl.int64)
    q_p += wide * q_stride + head * q_head
    q_MN = rows(q_p, here_M, m_, q_stride, N, BN)
    q_MR = rows(q_p + N, here_M, m_, q_stride, R, BR)
    do_MV = rows(do_p + wide * do_stride + head * do_head, here_M, m_, do_stride, V, BV)
    o_MV = rows(o_p + (wide * H + head) * V, here_M, m_, H * V, V, BV)
    delta_M = tl.sum(o_MV.to(tl.float32) * do_MV.to(tl.float32), axis=1)
    row_at = head * num_queries + q0 + m_
    tl.store(delta_p + row_at, delta_M, mask=here_M)
    lse_M = tl.load(lse_p + row_at, mask=here_M, other=float("inf"))
    k_p, v_p = k_p + head * k_head, v_p + head * v_head
    last_M = q0 + shift + m_
    end = tl.minimum(q0 + BM, q_end) + shift
    low_M = tl.zeros([BM], tl.int32)
    if DOCUMENTS:
        low = tl.load(first_p + q0)
        low_M = tl.load(first_p + q0 + m_, mask=here_M, other=0)
    dq_MN = tl.zeros([BM, BN], tl.float32)
    dq_MR = tl.zeros([BM, BR], tl.float32)
    first = tl.zeros([], tl.int64)
    for s in tl.range(low, end, BS, num_stages=STAGES):
        here_S = s_ < end - s
        k_SN = rows(k_p + (first + s) * k_stride, here_S, s_, k_stride, N, BN)
        r_SR = rows(r_p + (first + s) * r_stride, here_S, s_, r_stride, R, BR)
        v_SV = rows(v_p + (first + s) * v_stride, here_S, s_, v_stride, V, BV)
        sees_MS = (s + s_)[None, :] <= last_M[:, None]
        if DOCUMENTS:
            sees_MS &= (s + s_)[None, :] >= low_M[:, None]
        s_MS = scores(q_MN, q_MR, k_SN, r_SR, PRECISION)
        dp_MS = tl.dot(do_MV, tl.trans(v_SV), input_precision=PRECISION)
        s_MS = s_MS * scale - lse_M[:, None]
        p_MS = exp2(tl.where(sees_MS, s_MS, float("-inf")), PTX)
        ds_MS = (p_MS * (dp_MS - delta_M[:, None])).to(k_SN.dtype)
        dq_MN = tl.dot(ds_MS, k_SN, dq_MN, input_precision=PRECISION)
        dq_MR = tl.dot(ds_MS, r_SR, dq_MR, input_precision=PRECISION)
    n_, r_ = tl.arange(0, BN), tl.arange(0, BR)
    dq_at = dq_p + ((wide + m_) * H + head)[:, None] * (N + R)
    DTYPE: tl.constexpr = dq_p.dtype.element_ty
    dq_MN, dq_MR = (dq_MN * unit).to(DTYPE), (dq_MR * unit).to(DTYPE)
    tl.store(dq_at + n_[None, :], dq_MN, mask=inside(here_M, n_, N, BN))
    tl.store(dq_at + N + r_[None, :], dq_MR, mask=inside(here_M, r_, R, BR))


@triton.jit(do_not_specialize=["num_tiles", "num_queries"])
def _keys(
    q_p,
    k_p,
    r_p,
    v_p,
    lse_p,
    do_p,
    delta_p,
    dk_p,
    dr_p,
    dv_p,
    key_p,
    first_p,
    end_p,
    q_stride,
    q_head,
    k_stride,
    k_head,
    r_stride,
    v_stride,
    v_head,
    do_stride,
    do_head,
    num_tiles,
    num_queries,
    scale,
    unit,
    H: tl.constexpr,
    N: tl.constexpr,
    R: tl.constexpr,
    V: tl.constexpr,
    BN: tl.constexpr,
    BR: tl.constexpr,
    BV: tl.constexpr,
    BM: tl.constexpr,
    BS: tl.constexpr,
    DOCUMENTS: tl.constexpr,
    STAGES: tl.constexpr,
    PRECISION: tl.constexpr,
    PTX: tl.constexpr,
):
    head = (tl.program_id(0) // num_tiles).to(tl.int64)
    tile_p = key_p + (tl.program_id(0) % num_tiles) * 5
    s0, s_end = tl.load(tile_p), tl.load(tile_p + 1)
    low, end, shift = tl.load(tile_p + 2), tl.load(tile_p + 3), tl.load(tile_p + 4)
    m_, s_ = tl.arange(0, BM), tl.arange(0, BS)
    here_S = s_ < s_end - s0
    wide = s0.to(tl.int64)
    k_SN = rows(k_p + wide * k_stride + head * k_head, here_S, s_, k_stride, N, BN)
    r_SR = rows(r_p + wide * r_stride, here_S, s_, r_stride, R, BR)
    v_SV = rows(v_p + wide * v_stride + head * v_head, here_S, s_, v_stride, V, BV)
    at_S = s0 + s_
    low = tl.maximum(low, s0 - shift)
    if DOCUMENTS:
        end = tl.load(end_p + tl.minimum(s0 + BS, s_end) - 1)
    q_p += head * q_head
    do_p += head * do_head
    lse_p += head * num_queries
    delta_p += head * num_queries
    dk_SN = tl.zeros([BS, BN], tl.float32)
    dr_SR = tl.zeros([BS, BR], tl.float32)
    dv_SV = tl.zeros([BS, BV], tl.float32)
    first = tl.zeros([], tl.int64)
    for q in tl.range(low, end, BM, num_stages=STAGES):
        here_M = m_ < end - q
        q_at = q_p + (first + q) * q_stride
        q_MN = rows(q_at, here_M, m_, q_stride, N, BN)
        q_MR = rows(q_at + N, here_M, m_, q_stride, R, BR)
        do_MV = rows(do_p + (first + q) * do_stride, here_M, m_, do_stride, V, BV)
        # What is not there has a score of -inf.
        lse_M = tl.load(lse_p + q + m_, mask=here_M, other=float("inf"))
        delta_M = tl.load(delta_p + q + m_, mask=here_M, other=0.0)
        sees_SM = at_S[:, None] <= (q + shift + m_)[None, :]
        if DOCUMENTS:
            low_M = tl.load(first_p + q + m_, mask=here_M, other=0)
            sees_SM &= at_S[:, None] >= low_M[None, :]
        s_SM = scores(k_SN, r_SR, q_MN, q_MR, PRECISION)
        dp_SM = tl.dot(v_SV, tl.trans(do_MV), input_precision=PRECISION)
        s_SM = s_SM * scale - lse_M[None, :]
        p_SM = exp2(tl.where(sees_SM, s_SM, float("-inf")), PTX)
        dv_SV = tl.dot(p_SM.to(do_MV.dtype), do_MV, dv_SV, input_precision=PRECISION)
        ds_SM = (p_SM * (dp_SM - delta_M[None, :])).to(q_MN.dtype)
        dk_SN = tl.dot(ds_SM, q_MN, dk_SN, input_precision=PRECISION)
        dr_SR = tl.dot(ds_SM, q_MR, dr_SR, input_precision=PRECISION)
    n_, r_, v_ = tl.arange(0, BN), tl.arange(0, BR), tl.arange(0, BV)
    row_S1 = ((wide + s_) * H + head)[:, None]
    DTYPE: tl.constexpr = dk_p.dtype.element_ty
    dk_SN = (dk_SN * unit).to(DTYPE)
    tl.store(dk_p + row_S1 * N + n_[None, :], dk_SN, mask=inside(here_S, n_, N, BN))
    tl.store(dr_p + row_S1 * R + r_[None, :], dr_SR * unit, mask=inside(here_S, r_, R, BR))
    dv_at = dv_p + row_S1 * V + v_[None, :]
    tl.store(dv_at, dv_SV.to(DTYPE), mask=inside(here_S, v_, V, BV))
