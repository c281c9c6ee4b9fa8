"""Expanded prefill forward: a program attends from a tile of queries of one head.

Legend: T queries, S keys, H heads, K query width = N own + R shared key channels, V value width,
I tiles; M queries and S keys of a tile.

Scores are two products, of a head's own key channels and of those that all heads share, which are
never copied out to heads. The softmax is a running one (Milakov and Gimelshein, arXiv 1805.02867)
of base 2. Tiles that every query sees whole need no mask; they have a loop of their own.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from perilune.kernels.common.triton_math import LOG2_E, dot_precision, exp2, uses_ptx
from perilune.kernels.mla.triton_prefill_table import Documents


class Tile(NamedTuple):
    queries: int
    keys: int
    num_warps: int
    stages: int
    """Tiles of keys under way at a time, with the one that is worked on."""


class Operands(NamedTuple):
    """Any strides, but the last axis in one piece."""

    q_THK: Tensor
    k_SHN: Tensor
    shared_SR: Tensor
    v_SHV: Tensor
    scale: float

    @property
    def strides(self) -> tuple[int, ...]:
        q, k, r, v = self[:4]
        return (*q.stride()[:2], *k.stride()[:2], r.stride(0), *v.stride()[:2])

    @property
    def sizes(self) -> dict[str, int]:
        """Widths, and their blocks: what a tile of a matrix product can be."""
        widths = {"N": self.k_SHN.shape[2], "R": self.shared_SR.shape[1], "V": self.v_SHV.shape[2]}
        blocks = {f"B{name}": max(16, triton.next_power_of_2(w)) for name, w in widths.items()}
        return {"H": self.q_THK.shape[1], **widths, **blocks}

    @property
    def settings(self) -> dict[str, object]:
        dtype, device = self.q_THK.dtype, self.q_THK.device
        return {"PRECISION": dot_precision(dtype), "PTX": uses_ptx(device)}


class Attended(NamedTuple):
    o_THV: Tensor
    lse_HT: Tensor
    """log2 of the sum of 2^(score log2 e), fp32."""


TILE = Tile(128, 64, 8, 3)
FP32_TILE = Tile(32, 32, 8, 2)


def tile_of(dtype: torch.dtype) -> Tile:
    return FP32_TILE if dtype == torch.float32 else TILE


def forward(x: Operands, query_I4: Tensor, documents: Documents | None, tile: Tile) -> Attended:
    """`query_I4` is of tiles of `tile.queries`."""
    (t, h, _), v = x.q_THK.shape, x.v_SHV.shape[2]
    out = Attended(x.q_THK.new_empty(t, h, v), x.q_THK.new_empty(h, t, dtype=torch.float32))
    if t:
        _forward[(len(query_I4) * h,)](
            *x[:4],
            *out,
            query_I4,
            query_I4 if documents is None else documents.first_T,
            *x.strides,
            len(query_I4),
            t,
            x.scale * LOG2_E.value,
            **x.sizes,
            BM=tile.queries,
            BS=tile.keys,
            DOCUMENTS=documents is not None,
            STAGES=tile.stages,
            **x.settings,
            num_warps=tile.num_warps,
        )
    return out


@triton.jit
def inside(here_M, c_, C: tl.constexpr, BC: tl.constexpr):
    """Rows that are here, and channels where a block has more of them than there are."""
    if C == BC:
        return here_M[:, None]
    else:
        return here_M[:, None] & (c_ < C)[None, :]


@triton.jit
def rows(x_p, here_M, m_, stride, C: tl.constexpr, BC: tl.constexpr):
    """[M, C] of a tile at `x_p`; zeros where `here_M` says no."""
    c_ = tl.arange(0, BC)
    at_MC = m_[:, None] * stride + c_[None, :]
    return tl.load(x_p + at_MC, mask=inside(here_M, c_, C, BC), other=0.0)


@triton.jit
def whole_rows(x_p, m_, stride, C: tl.constexpr, BC: tl.constexpr):
    """[M, C] of a tile that lies inside of its sequence."""
    c_ = tl.arange(0, BC)
    at_MC = m_[:, None] * stride + c_[None, :]
    if C == BC:
        return tl.load(x_p + at_MC)
    else:
        return tl.load(x_p + at_MC, mask=(c_ < C)[None, :], other=0.0)


@triton.jit
def scores(q_MN, q_MR, k_SN, r_SR, PRECISION: tl.constexpr):
    # The second product can run while something else is computed, so that it is the larger one.
    s_MS = tl.dot(q_MR, tl.trans(r_SR), input_precision=PRECISION)
    return tl.dot(q_MN, tl.trans(k_SN), s_MS, input_precision=PRECISION)


@triton.jit
def seen(s_MS, at_S, low_M, last_M, DOCUMENTS: tl.constexpr):
    """Scores of a query's own first to its own last key."""
    sees_MS = at_S[None, :] <= last_M[:, None]
    if DOCUMENTS:
        sees_MS &= at_S[None, :] >= low_M[:, None]
    return tl.where(sees_MS, s_MS, float("-inf"))


@triton.jit
def _attend(s_MS, v_SV, scale, top_M, total_M, o_MV, PRECISION: tl.constexpr, PTX: tl.constexpr):
    """One more tile of keys. A query that has seen none yet stays empty."""
    higher_M = tl.maximum(top_M, tl.max(s_MS, axis=1) * scale)
    base_M = tl.where(higher_M == float("-inf"), 0.0, higher_M)
    p_MS = exp2(s_MS * scale - base_M[:, None], PTX)
    faded_M = exp2(top_M - base_M, PTX)
    total_M = total_M * faded_M + tl.sum(p_MS, axis=1)
    p_MS = p_MS.to(v_SV.dtype)
    o_MV = tl.dot(p_MS, v_SV, o_MV * faded_M[:, None], input_precision=PRECISION)
    return higher_M, total_M, o_MV


@triton.jit(do_not_specialize=["num_tiles", "num_queries"])
def _forward(
    q_p,
    k_p,
    r_p,
    v_p,
    o_p,
    lse_p,
    query_p,
    first_p,
    q_stride,
    q_head,
    k_stride,
    k_head,
    r_stride,
    v_stride,
    v_head,
    num_tiles,
    num_queries,
    scale,
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
    # The tiles of a head are neighbours: its keys and values come from memory once.
    head = (tl.program_id(0) // num_tiles).to(tl.int64)
    tile_p = query_p + (tl.program_id(0) % num_tiles) * 4
    q0, q_end = tl.load(tile_p), tl.load(tile_p + 1)
    low, shift = tl.load(tile_p + 2), tl.load(tile_p + 3)
    m_, s_ = tl.arange(0, BM), tl.arange(0, BS)
    here_M = m_ < q_end - q0
    q_p += q0.to(tl.int64) * q_stride + head * q_head
    q_MN = rows(q_p, here_M, m_, q_stride, N, BN)
    q_MR = rows(q_p + N, here_M, m_, q_stride, R, BR)
    k_p, v_p = k_p + head * k_head, v_p + head * v_head
    last_M = q0 + shift + m_
    last = tl.minimum(q0 + BM, q_end) - 1
    end = last + shift + 1
    # Keys low .. end; a query of the tile sees its own first to its own last one, and all of them
    # see whole tiles from `whole` to `part`.
    whole, low_M = low, tl.zeros([BM], tl.int32)
    if DOCUMENTS:
        low = tl.load(first_p + q0)
        low_M = tl.load(first_p + q0 + m_, mask=here_M, other=0)
        whole = low + tl.cdiv(tl.load(first_p + last) - low, BS) * BS
    part = whole + tl.maximum(q0 + shift + 1 - whole, 0) // BS * BS
    before = (whole - low) // BS
    masked = before + tl.maximum(tl.cdiv(end - part, BS) - 1, 0)
    top_M = tl.full([BM], float("-inf"), tl.float32)
    total_M = tl.zeros([BM], tl.float32)
    o_MV = tl.zeros([BM, BV], tl.float32)
    first = tl.zeros([], tl.int64)
    # The scores of the next tile are on their way while those of a tile are summed.
    here_S = s_ < end - whole
    k_SN = rows(k_p + (first + whole) * k_stride, here_S, s_, k_stride, N, BN)
    r_SR = rows(r_p + (first + whole) * r_stride, here_S, s_, r_stride, R, BR)
    s_MS = scores(q_MN, q_MR, k_SN, r_SR, PRECISION)
    for s in tl.range(whole, part, BS, num_stages=STAGES):
        here_S = s_ < end - BS - s
        v_SV = whole_rows(v_p + (first + s) * v_stride, s_, v_stride, V, BV)
        k_SN = rows(k_p + (first + s + BS) * k_stride, here_S, s_, k_stride, N, BN)
        r_SR = rows(r_p + (first + s + BS) * r_stride, here_S, s_, r_stride, R, BR)
        next_MS = scores(q_MN, q_MR, k_SN, r_SR, PRECISION)
        top_M, total_M, o_MV = _attend(s_MS, v_SV, scale, top_M, total_M, o_MV, PRECISION, PTX)
        s_MS = next_MS
    at_S = first + part + s_
    v_SV = rows(v_p + (first + part) * v_stride, at_S < end, s_, v_stride, V, BV)
    s_MS = seen(s_MS, at_S, low_M, last_M, DOCUMENTS)
    top_M, total_M, o_MV = _attend(s_MS, v_SV, scale, top_M, total_M, o_MV, PRECISION, PTX)
    for i in tl.range(0, masked, num_stages=2):
        s0 = first + tl.where(i < before, low + i * BS, part + (1 + i - before) * BS)
        at_S = s0 + s_
        here_S = at_S < end
        k_SN = rows(k_p + s0 * k_stride, here_S, s_, k_stride, N, BN)
        r_SR = rows(r_p + s0 * r_stride, here_S, s_, r_stride, R, BR)
        v_SV = rows(v_p + s0 * v_stride, here_S, s_, v_stride, V, BV)
        s_MS = scores(q_MN, q_MR, k_SN, r_SR, PRECISION)
        s_MS = seen(s_MS, at_S, low_M, last_M, DOCUMENTS)
        top_M, total_M, o_MV = _attend(s_MS, v_SV, scale, top_M, total_M, o_MV, PRECISION, PTX)
    o_MV *= (1.0 / total_M)[:, None]
    v_ = tl.arange(0, BV)
    at_M = (q0.to(tl.int64) + m_) * H + head
    o_at = o_p + at_M[:, None] * V + v_[None, :]
    tl.store(o_at, o_MV.to(o_p.dtype.element_ty), mask=inside(here_M, v_, V, BV))
    lse_at = lse_p + head * num_queries + q0 + m_
    tl.store(lse_at, top_M + tl.log2(total_M), mask=here_M)
