"""KDA in chunks, backward: gradients of the inputs of every chunk, from its states and theirs.

Legend: M chunks of all sequences, C tokens of a chunk, H heads, K key width, V value width,
T packed tokens.

With x = solve (v - k_in S), solve = (I + L)^-1 beta, L = beta * scores of k, and dv = solve^T dx:

    d k_in = -dv S^T,   d scores = -dv x^T,   d beta = (dv . x) / beta^2

`_products` forms these, and the gradients of q and of k as reader and as key of the chunk, all but
for their factors. `_finish` has the factors. A log-decay scales every later reading and every
earlier key: its gradient is a running sum of q dq + k dk, the sign by the side on which k stands.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from perilune.kernels.common.triton_math import exp2
from perilune.kernels.kda.triton_chunk import (
    decays,
    documents,
    fits,
    gap_after,
    gates,
    norm_of,
    row_of,
    rows_of,
    running_sum,
    token_order,
)
from perilune.kernels.kda.triton_forward import Factors, KDAInputs, flags, meta, warps
from perilune.kernels.kda.triton_table import CHUNK, ChunkTable


class Chunks(NamedTuple):
    """Of every chunk and head, rows in `token_order`."""

    S_MHVK: Tensor
    """The incoming state."""
    D_MHVK: Tensor
    """The gradient of the outgoing state."""
    x_2MHVC: Tensor
    """What was written over the rounding of beta: rounded, and the rest."""
    dv_rest_MHVC: Tensor
    """What rounding took from the gradient of v."""
    keep_MHK: Tensor
    """The decay over the chunk."""


class Products(NamedTuple):
    d_3MHCK: Tensor
    """Gradients of q, of k as reader and of k as key, without their factors."""
    scores_2MHCC: Tensor
    """Gradients of the scores of q and of k, 0 above the diagonal; for an unbounded gate alone."""
    out_MHCK: Tensor
    """The part of k as key that comes through the outgoing state, without its factor."""
    last_MHK: Tensor
    """Of the log-decay that the incoming state undergoes."""


def gradients(
    x: KDAInputs,
    table: ChunkTable,
    chunks: Chunks,
    factors: Factors,
    do_THV: Tensor,
    dv_THV: Tensor,
) -> tuple[Tensor, ...]:
    """Of q, k, z, b, A_log and dt_bias."""
    heads, k, _ = x.sizes
    m, q = table.num_chunks, x.q_THK
    wide = {"dtype": torch.float32}
    products = Products(
        # Sums of these cancel: they are not rounded in between.
        q.new_empty(3, m, heads, CHUNK, k, **wide),
        q.new_empty(2 if x.lower_bound is None else 0, m, heads, CHUNK, CHUNK),
        q.new_empty(m, heads, CHUNK, k),
        q.new_empty(m, heads, k, **wide),
    )
    dt_bias_MHK, A_log_MH = q.new_empty(m, heads, k, **wide), q.new_empty(m, heads, **wide)
    dq, dk, dz, db = (
        torch.empty_like(t, memory_format=torch.contiguous_format)
        for t in (q, x.k_THK, x.z_THK, x.b_TH)
    )
    _products[(m * heads,)](
        *(x.b_TH, *table.of_chunks, *chunks, *factors, do_THV, dv_THV),
        *(db, *products),
        *(x.b_TH.stride(0), m * heads),
        **meta(x),
        SEGMENTED=table.segment_T is not None,
        BOUNDED=x.lower_bound is not None,
        **warps(x, 168),
    )
    _finish[(m * heads,)](
        *(x.q_THK, x.k_THK, x.z_THK, x.A_log_H, x.dt_bias_HK, *table.of_chunks[:2]),
        *(*products, dq, dk, dz, A_log_MH, dt_bias_MHK),
        *(x.q_THK.stride(0), x.k_THK.stride(0), x.z_THK.stride(0), m * heads),
        0.0 if x.lower_bound is None else x.lower_bound,
        **meta(x),
        **{name: flag for name, flag in flags(x, table).items() if name != "SEGMENTED"},
        num_warps=4,
    )
    return dq, dk, dz, db, A_log_MH.sum(0), dt_bias_MHK.sum(0)


@triton.jit
def _products(
    b_p,
    start_p,
    length_p,
    carries_p,
    segment_p,
    S_p,
    D_p,
    x_p,
    dv_rest_p,
    keep_p,
    factors_p,
    scale_p,
    by_p,
    do_p,
    dv_p,
    db_p,
    d_p,
    scores_p,
    out_p,
    last_p,
    b_stride,
    num_tiles,
    H: tl.constexpr,
    K: tl.constexpr,
    V: tl.constexpr,
    C: tl.constexpr,
    PRECISION: tl.constexpr,
    SEGMENTED: tl.constexpr,
    BOUNDED: tl.constexpr,
):
    m, h = tl.program_id(0) // H, tl.program_id(0) % H
    DTYPE: tl.constexpr = S_p.dtype.element_ty
    start, length = tl.load(start_p + m), tl.load(length_p + m)
    row_C, k_, v_ = tl.arange(0, C), tl.arange(0, K), tl.arange(0, V)
    t_C = token_order(C)
    here_C = t_C < length
    valid_CC = t_C[:, None] >= t_C[None, :]
    if SEGMENTED:
        document_C, carried_C, kept_C, _ = documents(
            segment_p, carries_p, m, start, t_C, here_C, length
        )
        valid_CC = valid_CC & (document_C[:, None] == document_C[None, :])
    tile = tl.program_id(0).to(tl.int64) * C
    tiles = num_tiles.to(tl.int64) * C
    at_CC = tile * C + row_C[:, None] * C + row_C[None, :]
    at_KC = tile * K + k_[:, None] + row_C[None, :] * K
    state_at = tl.program_id(0).to(tl.int64) * K * V + (v_[:, None] * K + k_[None, :])
    o_at = (start + t_C)[:, None] * (H * V) + (h * V + v_)[None, :]

    x_at = x_p + tile * V + v_[:, None] * C + row_C[None, :]
    x_VC = tl.load(x_at)
    x_rest_VC = tl.load(x_at + tiles * V)
    do_CV = tl.load(do_p + o_at, mask=here_C[:, None], other=0.0).to(DTYPE)
    d_attn_CC = tl.dot(do_CV, x_VC, input_precision=PRECISION)
    d_attn_CC = tl.dot(do_CV, x_rest_VC, d_attn_CC, input_precision=PRECISION)
    b_C = tl.load(b_p + (start + t_C) * b_stride + h, mask=here_C, other=0.0).to(tl.float32)
    by_C = tl.load(by_p + tile + row_C)
    d_attn = tl.where(valid_CC, d_attn_CC * by_C[None, :], 0.0).to(DTYPE)

    dv_CV = tl.load(dv_p + o_at, mask=here_C[:, None], other=0.0).to(DTYPE)
    dv_VC = tl.trans(dv_CV)
    # (1 - beta) / beta = e^-b; below b = -80 the product of dv and x is 0 all the same.
    by_b_C = tl.exp(tl.minimum(-b_C, 80.0))
    whole_VC = x_VC.to(tl.float32) + x_rest_VC.to(tl.float32)
    whole_VC *= dv_VC.to(tl.float32) + tl.load(
        dv_rest_p + tile * V + v_[:, None] * C + row_C[None, :]
    ).to(tl.float32)
    db_C = tl.sum(whole_VC, axis=0) * by_C * by_b_C
    tl.store(db_p + (start + t_C) * H + h, db_C.to(db_p.dtype.element_ty), mask=here_C)
    d_pairs_CC = tl.dot(dv_CV, x_VC, input_precision=PRECISION)
    below_CC = valid_CC & (t_C[:, None] > t_C[None, :])
    d_pairs = tl.where(below_CC, d_pairs_CC * -by_C[None, :], 0.0).to(DTYPE)
    if not BOUNDED:
        tl.store(scores_p + at_CC, d_attn)
        tl.store(scores_p + tiles * C + at_CC, d_pairs)

    scale_K = tl.load(scale_p + tl.program_id(0) * K + k_)
    k_down_KC = tl.load(factors_p + at_KC)
    S_VK = tl.load(S_p + state_at)
    S_KV = tl.trans(S_VK)
    dq_KC = tl.dot(S_KV, tl.trans(do_CV), input_precision=PRECISION) * scale_K[:, None]
    dk_in_KC = tl.dot(S_KV, dv_VC, input_precision=PRECISION) * -scale_K[:, None]
    if SEGMENTED:
        dq_KC *= carried_C[None, :]
        dk_in_KC *= carried_C[None, :]
    dq_KC = tl.dot(k_down_KC, tl.trans(d_attn), dq_KC, input_precision=PRECISION)
    _store(d_p + at_KC, dq_KC)
    dk_in_KC = tl.dot(k_down_KC, tl.trans(d_pairs), dk_in_KC, input_precision=PRECISION)
    _store(d_p + tiles * K + at_KC, dk_in_KC)

    D_VK = tl.load(D_p + state_at)
    last_K = tl.sum(S_VK.to(tl.float32) * D_VK.to(tl.float32), axis=0)
    dk_out_KC = tl.dot(tl.trans(D_VK), x_VC, input_precision=PRECISION)
    dk_out_KC = tl.dot(tl.trans(D_VK), x_rest_VC, dk_out_KC, input_precision=PRECISION)
    dk_out_KC *= scale_K[:, None] * by_C[None, :]
    if SEGMENTED:
        dk_out_KC *= kept_C[None, :]
    # Where a key's decays begin and end cancels later on, if both are of the same rounded number.
    dk_out = dk_out_KC.to(DTYPE)
    _store(out_p + at_KC, dk_out)
    dk_out_KC = dk_out.to(tl.float32)
    q_up_KC = tl.load(factors_p + 2 * tiles * K + at_KC)
    dk_out_KC = tl.dot(q_up_KC, d_attn, dk_out_KC, input_precision=PRECISION)
    k_up_KC = tl.load(factors_p + tiles * K + at_KC)
    dk_out_KC = tl.dot(k_up_KC, d_pairs, dk_out_KC, input_precision=PRECISION)
    _store(d_p + 2 * tiles * K + at_KC, dk_out_KC)
    last_K *= tl.load(keep_p + tl.program_id(0) * K + k_)
    tl.store(last_p + tl.program_id(0) * K + k_, last_K)


@triton.jit
def _store(at_KC, x_KC):
    """Rows as long as the keys are wide: transposed in registers, so that writes coalesce."""
    tl.store(tl.trans(at_KC), tl.trans(x_KC.to(at_KC.dtype.element_ty)))


@triton.jit
def _finish(
    q_p,
    k_p,
    z_p,
    A_log_p,
    dt_bias_p,
    start_p,
    length_p,
    d_p,
    scores_p,
    out_p,
    last_p,
    dq_p,
    dk_p,
    dz_p,
    dA_log_p,
    d_dt_bias_p,
    q_stride,
    k_stride,
    z_stride,
    num_tiles,
    lower_bound,
    H: tl.constexpr,
    K: tl.constexpr,
    V: tl.constexpr,
    C: tl.constexpr,
    PRECISION: tl.constexpr,
    BOUNDED: tl.constexpr,
    PTX: tl.constexpr,
    L2_EPS: tl.constexpr,
):
    m, h = tl.program_id(0) // H, tl.program_id(0) % H
    DTYPE: tl.constexpr = out_p.dtype.element_ty
    start, length = tl.load(start_p + m), tl.load(length_p + m)
    row_C, k_ = tl.arange(0, C), tl.arange(0, K)
    t_C = token_order(C)
    here_C = t_C < length
    tile = tl.program_id(0).to(tl.int64) * C
    tiles = num_tiles.to(tl.int64) * C
    d_at = d_p + tile * K + row_C[:, None] * K + k_[None, :]
    at_CK = (start + t_C)[:, None] * (H * K) + (h * K + k_)[None, :]

    # The order of what follows, and gates that are formed twice, keep few tiles alive at a time.
    g_CK, G_CK, half_K = decays(
        z_p, z_stride, A_log_p, dt_bias_p, lower_bound, start, t_C, here_C, h, C, K, BOUNDED, PTX
    )
    start_K, end_K = half_K, half_K
    if not BOUNDED:
        factored = fits(G_CK, half_K)
        start_K = tl.where(factored, half_K, 0.0)
        end_K = tl.where(factored, half_K, 2.0 * half_K)
        dq_pairs_CK = tl.zeros_like(G_CK)
        dk_pairs_CK = tl.zeros_like(G_CK)
        dg_pairs_CK = tl.zeros_like(G_CK)
        if not factored:
            at_CC = tile * C + row_C[:, None] * C + row_C[None, :]
            dq_pairs_CK, dk_pairs_CK, dg_pairs_CK = _by_pairs(
                tl.load(scores_p + at_CC).to(tl.float32),
                tl.load(scores_p + tiles * C + at_CC).to(tl.float32),
                _unit(q_p, q_stride, start, t_C, here_C, h, K, L2_EPS) * K**-0.5,
                _unit(k_p, k_stride, start, t_C, here_C, h, K, L2_EPS),
                g_CK,
                t_C,
                C,
                K,
                PTX,
            )

    # The two ends of a score's decay cancel later on: both take q and k as the scores took them.
    k_CK = rows_of(k_p, k_stride, start, t_C, here_C, h, K).to(tl.float32)
    k_norm_C = norm_of(k_CK, L2_EPS)
    k_CK *= k_norm_C[:, None]
    down_CK = exp2(end_K[None, :] - G_CK, PTX)
    k_down_CK = (k_CK * down_CK).to(DTYPE).to(tl.float32)
    out_CK = tl.load(out_p + tile * K + row_C[:, None] * K + k_[None, :]).to(tl.float32) * k_down_CK
    last_K = tl.load(last_p + tl.program_id(0) * K + k_) + tl.sum(out_CK, axis=0)
    dk_CK = tl.load(d_at + 2 * tiles * K)
    by_decay_CK = -dk_CK * k_down_CK
    dk_CK *= down_CK
    up_CK = exp2(G_CK - start_K[None, :], PTX)
    dk_in_CK = tl.load(d_at + tiles * K)
    by_decay_CK += dk_in_CK * (k_CK * up_CK).to(DTYPE).to(tl.float32)
    dk_CK += dk_in_CK * up_CK
    if not BOUNDED:
        dk_CK += dk_pairs_CK
    dk_CK = (dk_CK - tl.sum(dk_CK * k_CK, axis=1)[:, None] * k_CK) * k_norm_C[:, None]
    tl.store(dk_p + at_CK, dk_CK.to(dk_p.dtype.element_ty), mask=here_C[:, None])

    q_CK = rows_of(q_p, q_stride, start, t_C, here_C, h, K).to(tl.float32)
    q_norm_C = norm_of(q_CK, L2_EPS)
    q_CK *= ((K**-0.5) * q_norm_C)[:, None]
    dq_CK = tl.load(d_at)
    by_decay_CK += dq_CK * (q_CK * up_CK).to(DTYPE).to(tl.float32)
    dq_CK *= up_CK
    if not BOUNDED:
        dq_CK += dq_pairs_CK
    # q_CK is K^-1/2 of a unit vector.
    dq_CK -= (K * tl.sum(dq_CK * q_CK, axis=1))[:, None] * q_CK
    dq_CK *= ((K**-0.5) * q_norm_C)[:, None]
    tl.store(dq_p + at_CK, dq_CK.to(dq_p.dtype.element_ty), mask=here_C[:, None])

    dg_CK = by_decay_CK - running_sum(by_decay_CK, C, K)
    dg_CK += (last_K + tl.sum(by_decay_CK, axis=0))[None, :]
    if not BOUNDED and not factored:
        # Readings fade and keys grow by any amount: neither is told from a difference of sums.
        dg_CK = running_sum(by_decay_CK + out_CK, C, K, True)
        dg_CK += running_sum(out_CK, C, K) - out_CK
        dg_CK += tl.load(last_p + tl.program_id(0) * K + k_)[None, :] + dg_pairs_CK

    z_CK, g_CK, slope_CK = gates(
        z_p, z_stride, A_log_p, dt_bias_p, lower_bound, start, t_C, here_C, h, K, BOUNDED, PTX
    )
    dz_CK = tl.where(here_C[:, None], dg_CK * slope_CK, 0.0)
    tl.store(dz_p + at_CK, dz_CK.to(dz_p.dtype.element_ty), mask=here_C[:, None])
    tl.store(d_dt_bias_p + tl.program_id(0) * K + k_, tl.sum(dz_CK, axis=0))
    by_rate_CK = dz_CK * z_CK if BOUNDED else dg_CK * g_CK * 0.6931471805599453
    tl.store(dA_log_p + tl.program_id(0), tl.sum(tl.sum(by_rate_CK, axis=1), axis=0))


@triton.jit
def _unit(x_p, stride, start, t_C, here_C, h, K: tl.constexpr, EPS: tl.constexpr):
    """A chunk's rows, each of norm 1."""
    x_CK = rows_of(x_p, stride, start, t_C, here_C, h, K).to(tl.float32)
    return x_CK * norm_of(x_CK, EPS)[:, None]


@triton.jit
def _by_pairs(
    d_attn_CC,
    d_pairs_CC,
    q_CK,
    k_CK,
    g_CK,
    t_C,
    C: tl.constexpr,
    K: tl.constexpr,
    PTX: tl.constexpr,
):
    """Through the scores of q and of k, one pair at a time: gradients of q, of k and of the
    log-decays; [C, K] each. The gradients of the scores must be zero above the diagonal."""
    dq_CK = tl.zeros_like(q_CK)
    dk_CK = tl.zeros_like(q_CK)
    dg_CK = tl.zeros_like(q_CK)
    gap_CK = tl.zeros_like(q_CK)
    for back in range(C):
        j = C - 1 - back
        gap_CK = gap_after(gap_CK, g_CK, t_C, j)
        decay_CK = exp2(gap_CK, PTX)
        here = t_C[None, :] == j
        d_attn_C = tl.sum(tl.where(here, d_attn_CC, 0.0), axis=1)[:, None]
        d_pairs_C = tl.sum(tl.where(here, d_pairs_CC, 0.0), axis=1)[:, None]
        k_j = row_of(k_CK, t_C, j)[None, :]
        dq_CK += d_attn_C * k_j * decay_CK
        dk_CK += d_pairs_C * k_j * decay_CK
        by_key_CK = (d_attn_C * q_CK + d_pairs_C * k_CK) * decay_CK
        dk_CK += tl.where(t_C[:, None] == j, tl.sum(by_key_CK, axis=0)[None, :], 0.0)
        by_gap_CK = running_sum(by_key_CK * k_j, C, K, True)
        dg_CK += tl.where(t_C[:, None] > j, by_gap_CK, 0.0)
    return dq_CK, dk_CK, dg_CK
