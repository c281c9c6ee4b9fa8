"""KDA in chunks, forward: every chunk is prepared at once, then the state runs through them.

Legend: M chunks of all sequences, C tokens of a chunk, N sequences, H heads, K key width, V value
width, T packed tokens.

A chunk maps the state S that comes in to its outputs and to the state that goes out:

    x   = u + w S                   what it writes, [C, V] (x carries the norm of its key)
    o   = q_scale (q_in S + attn x)
    S' <- keep S + k_out^T x

`_prepare` forms the seven pieces in one pass over the inputs (a program a chunk and head), all
scalings folded into the [C, C] matrices. `_chain` does the rest, with the state transposed: it is
then the left operand of every product and never leaves the registers.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from perilune.kernels.common.triton_math import dot_precision, sigmoid, uses_ptx
from perilune.kernels.kda.reference import L2_EPS
from perilune.kernels.kda.triton_chunk import documents, gates, inverse, row, rows_of, scores
from perilune.kernels.kda.triton_table import CHUNK, ChunkTable


class KDAInputs(NamedTuple):
    q_THK: Tensor
    k_THK: Tensor
    v_THV: Tensor
    z_THK: Tensor
    b_TH: Tensor
    A_log_H: Tensor
    dt_bias_HK: Tensor
    lower_bound: float | None

    @property
    def sizes(self) -> tuple[int, int, int]:
        """H, K, V."""
        return *self.k_THK.shape[1:], self.v_THV.shape[2]


class Tiles(NamedTuple):
    q_in_MHCK: Tensor
    w_MHCK: Tensor
    k_out_MHCK: Tensor
    u_MHVC: Tensor
    attn_MHCC: Tensor
    """Transposed: [j, i] is the weight of token j for token i."""
    keep_MHK: Tensor
    q_scale_MHC: Tensor


def meta(x: KDAInputs) -> dict[str, object]:
    """Compile-time settings that all kernels share."""
    heads, k, v = x.sizes
    return {
        "H": heads,
        "K": k,
        "V": v,
        "C": CHUNK,
        "PRECISION": dot_precision(x.q_THK.dtype),
    }


def flags(x: KDAInputs, table: ChunkTable) -> dict[str, object]:
    return {
        "BOUNDED": x.lower_bound is not None,
        "SEGMENTED": table.segment_T is not None,
        "PTX": uses_ptx(x.q_THK.device),
        "L2_EPS": L2_EPS,
    }


def prepare(x: KDAInputs, table: ChunkTable) -> Tiles:
    heads, k, v = x.sizes
    m, q = table.num_chunks, x.q_THK
    wide = {"dtype": torch.float32}
    tiles = Tiles(
        *(q.new_empty(m, heads, CHUNK, k) for _ in range(3)),
        q.new_empty(m, heads, v, CHUNK),
        q.new_empty(m, heads, CHUNK, CHUNK),
        q.new_empty(m, heads, k, **wide),
        q.new_empty(m, heads, CHUNK, **wide),
    )
    _prepare[(m * heads,)](
        *x[:7],
        *table.pointers,
        *tiles,
        *(tensor.stride(0) for tensor in x[:5]),
        0.0 if x.lower_bound is None else x.lower_bound,
        **meta(x),
        **flags(x, table),
        num_warps=4,
    )
    return tiles


def chain(
    x: KDAInputs, tiles: Tiles, table: ChunkTable, state_NHKV: Tensor | None
) -> tuple[Tensor, Tensor]:
    """(outputs [T, H, V], fp32 states after each sequence)."""
    heads, k, v = x.sizes
    o_THV = torch.empty_like(x.v_THV, memory_format=torch.contiguous_format)
    after = x.q_THK.new_empty(table.num_sequences, heads, k, v, dtype=torch.float32)
    block = value_block(table.num_sequences * heads, v)
    _chain[(table.num_sequences * heads * (v // block.size),)](
        *tiles,
        *table.pointers[:2],
        table.first_N1,
        after if state_NHKV is None else state_NHKV,
        after,
        o_THV,
        **meta(x),
        BV=block.size,
        HAS_STATE=state_NHKV is not None,
        num_warps=block.num_warps,
        num_stages=3,
    )
    return o_THV, after


class ValueBlock(NamedTuple):
    size: int
    num_warps: int


def value_block(num_chains: int, v: int) -> ValueBlock:
    """Value columns of one program: all of them in two warp groups when there are enough chains to
    occupy a card, half of them otherwise."""
    if v >= 128 and num_chains >= 96:
        return ValueBlock(128, 8)
    return ValueBlock(min(v, 64), 4)


@triton.jit
def _prepare(
    q_p,
    k_p,
    v_p,
    z_p,
    b_p,
    A_log_p,
    dt_bias_p,
    start_p,
    length_p,
    carries_p,
    segment_p,
    q_in_p,
    w_p,
    k_out_p,
    u_p,
    attn_p,
    keep_p,
    q_scale_p,
    q_stride,
    k_stride,
    v_stride,
    z_stride,
    b_stride,
    lower_bound,
    H: tl.constexpr,
    K: tl.constexpr,
    V: tl.constexpr,
    C: tl.constexpr,
    PRECISION: tl.constexpr,
    BOUNDED: tl.constexpr,
    SEGMENTED: tl.constexpr,
    PTX: tl.constexpr,
    L2_EPS: tl.constexpr,
):
    m, h = tl.program_id(0) // H, tl.program_id(0) % H
    DTYPE: tl.constexpr = q_in_p.dtype.element_ty
    start, length = tl.load(start_p + m), tl.load(length_p + m)
    row_C, k_, v_ = tl.arange(0, C), tl.arange(0, K), tl.arange(0, V)
    here_C = row_C < length
    valid_CC = row_C[:, None] >= row_C[None, :]
    if SEGMENTED:
        document_C, carried_C, kept_C, through = documents(
            segment_p, carries_p, m, start, here_C, length, C
        )
        valid_CC = valid_CC & (document_C[:, None] == document_C[None, :])

    _, g_CK, _ = gates(
        z_p, z_stride, A_log_p, dt_bias_p, lower_bound, start, here_C, h, C, K, BOUNDED, PTX
    )
    G_CK = tl.cumsum(g_CK, axis=0)
    last_K = row(G_CK, C - 1, C)

    k_CK = rows_of(k_p, k_stride, start, here_C, h, C, K).to(tl.float32)
    k_norm_C = tl.rsqrt(tl.sum(k_CK * k_CK, axis=1) + L2_EPS)
    q_CK = rows_of(q_p, q_stride, start, here_C, h, C, K).to(tl.float32)
    q_scale_C = (K**-0.5) * tl.rsqrt(tl.sum(q_CK * q_CK, axis=1) + L2_EPS)
    attn_CC, pairs_CC, q_in_CK, k_in_CK, k_out_CK = scores(
        q_CK, k_CK, g_CK, G_CK, C, DTYPE, BOUNDED, PRECISION, PTX
    )
    if SEGMENTED:
        q_in_CK *= carried_C[:, None]
        k_in_CK *= carried_C[:, None]
        k_out_CK *= kept_C[:, None]

    tile = tl.program_id(0).to(tl.int64) * C
    at_CK = tile * K + row_C[:, None] * K + k_[None, :]
    tl.store(q_in_p + at_CK, q_in_CK.to(DTYPE))
    tl.store(k_out_p + at_CK, k_out_CK.to(DTYPE))
    keep_K = tl.exp2(last_K)
    if SEGMENTED:
        keep_K *= through
    tl.store(keep_p + tl.program_id(0) * K + k_, keep_K)
    tl.store(q_scale_p + tile + row_C, q_scale_C)
    attn_CC = tl.where(valid_CC, attn_CC, 0.0)
    tl.store(attn_p + tile * C + row_C[None, :] * C + row_C[:, None], attn_CC.to(DTYPE))

    b_C = tl.load(b_p + (start + row_C) * b_stride + h, mask=here_C, other=0.0).to(tl.float32)
    beta_C = sigmoid(b_C, PTX)
    L_CC = pairs_CC * (beta_C * k_norm_C)[:, None] * k_norm_C[None, :]
    L_CC = tl.where(valid_CC & (row_C[:, None] > row_C[None, :]), L_CC, 0.0)
    X_CC = inverse(L_CC, C, PRECISION) * k_norm_C[:, None] * beta_C[None, :]
    v_CV = rows_of(v_p, v_stride, start, here_C, h, C, V).to(DTYPE)
    u_VC = tl.dot(tl.trans(v_CV), tl.trans(X_CC.to(DTYPE)), input_precision=PRECISION)
    tl.store(u_p + tile * V + v_[:, None] * C + row_C[None, :], u_VC.to(DTYPE))
    X_CC = -X_CC * k_norm_C[None, :]
    w_CK = tl.dot(X_CC.to(DTYPE), k_in_CK.to(DTYPE), input_precision=PRECISION)
    tl.store(w_p + at_CK, w_CK.to(DTYPE))


@triton.jit
def _chain(
    q_in_p,
    w_p,
    k_out_p,
    u_p,
    attn_p,
    keep_p,
    q_scale_p,
    start_p,
    length_p,
    first_p,
    before_p,
    after_p,
    o_p,
    H: tl.constexpr,
    K: tl.constexpr,
    V: tl.constexpr,
    C: tl.constexpr,
    PRECISION: tl.constexpr,
    BV: tl.constexpr,
    HAS_STATE: tl.constexpr,
):
    nh = tl.program_id(0) // (V // BV)
    n, h = nh // H, nh % H
    DTYPE: tl.constexpr = q_in_p.dtype.element_ty
    row_C, k_ = tl.arange(0, C), tl.arange(0, K)
    v_ = (tl.program_id(0) % (V // BV)) * BV + tl.arange(0, BV)
    state_at = nh.to(tl.int64) * K * V + k_[None, :] * V + v_[:, None]
    S_VK = tl.zeros([BV, K], tl.float32)
    if HAS_STATE:
        S_VK += tl.load(before_p + state_at).to(tl.float32)
    for m in tl.range(tl.load(first_p + n), tl.load(first_p + n + 1), num_stages=3):
        tile = (m * H + h) * C
        w_KC = tl.load(w_p + tile * K + (k_[:, None] + row_C[None, :] * K))
        q_in_KC = tl.load(q_in_p + tile * K + (k_[:, None] + row_C[None, :] * K))
        k_out_CK = tl.load(k_out_p + tile * K + (row_C[:, None] * K + k_[None, :]))
        attn_CC = tl.load(attn_p + tile * C + (row_C[:, None] * C + row_C[None, :]))
        u_VC = tl.load(u_p + tile * V + (v_[:, None] * C + row_C[None, :])).to(tl.float32)
        keep_K = tl.load(keep_p + (m * H + h) * K + k_)
        q_scale_C = tl.load(q_scale_p + tile + row_C)
        start, length = tl.load(start_p + m), tl.load(length_p + m)

        S = S_VK.to(DTYPE)
        x_VC = tl.dot(S, w_KC, u_VC, input_precision=PRECISION).to(DTYPE)
        o_VC = tl.dot(S, q_in_KC, input_precision=PRECISION)
        o_VC = tl.dot(x_VC, attn_CC, o_VC, input_precision=PRECISION)
        S_VK = tl.dot(x_VC, k_out_CK, S_VK * keep_K[None, :], input_precision=PRECISION)

        o_CV = tl.trans(o_VC * q_scale_C[None, :]).to(o_p.dtype.element_ty)
        o_at = (start + row_C)[:, None] * (H * V) + (h * V + v_)[None, :]
        tl.store(o_p + o_at, o_CV, mask=(row_C < length)[:, None])
    tl.store(after_p + state_at, S_VK)
