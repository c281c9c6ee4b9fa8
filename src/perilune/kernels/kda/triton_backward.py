"""KDA in chunks, backward. Nothing but the inputs and the outputs is kept from the forward pass.

Legend: M chunks of all sequences, C tokens of a chunk, N sequences, H heads, K key width, V value
width, T packed tokens.

`_states` repeats the chain and keeps each chunk's incoming state S and what it wrote, x. `_reverse`
runs the gradient D of the outgoing state from the last chunk to the first:

    dx  = attn^T do + k_out D
    D  <- keep D + q_in^T do + w^T dx           (do here with q_scale in it)

`_gradients` turns S, D, x and dx into gradients of the inputs, every chunk by itself.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from perilune.kernels.common.triton_math import exp2, sigmoid
from perilune.kernels.kda.triton_chunk import (
    documents,
    gates,
    inverse,
    row,
    rows_of,
    score_gradients,
    scores,
)
from perilune.kernels.kda.triton_forward import KDAInputs, flags, meta, prepare, value_block
from perilune.kernels.kda.triton_table import CHUNK, ChunkTable


class KDAGradients(NamedTuple):
    q_THK: Tensor
    k_THK: Tensor
    v_THV: Tensor
    z_THK: Tensor
    b_TH: Tensor
    A_log_H: Tensor
    dt_bias_HK: Tensor
    state_NHKV: Tensor


def backward(
    x: KDAInputs,
    table: ChunkTable,
    state_NHKV: Tensor | None,
    o_THV: Tensor,
    do_THV: Tensor,
    d_after_NHKV: Tensor | None,
) -> KDAGradients:
    """Gradients of every input, of the gate's parameters and of the initial state."""
    heads, k, v = x.sizes
    m, n, q = table.num_chunks, table.num_sequences, x.q_THK
    tiles = prepare(x, table)
    block = value_block(n * heads, v)
    grid = (n * heads * (v // block.size),)
    settings = meta(x) | {"BV": block.size, "num_warps": block.num_warps}
    S_MHVK, D_MHVK = (q.new_empty(m, heads, v, k) for _ in range(2))
    x_MHVC, dx_MHVC = (q.new_empty(m, heads, v, CHUNK) for _ in range(2))
    d_before = q.new_empty(n, heads, k, v, dtype=torch.float32)
    _states[grid](
        *(tiles.w_MHCK, tiles.k_out_MHCK, tiles.u_MHVC, tiles.keep_MHK, table.first_N1),
        d_before if state_NHKV is None else state_NHKV,
        *(S_MHVK, x_MHVC),
        HAS_STATE=state_NHKV is not None,
        **settings,
    )
    _reverse[grid](
        *(tiles.q_in_MHCK, tiles.w_MHCK, tiles.k_out_MHCK, tiles.attn_MHCC, tiles.keep_MHK),
        *(tiles.q_scale_MHC, do_THV, table.start_M, table.length_M, table.first_N1),
        d_before if d_after_NHKV is None else d_after_NHKV,
        *(d_before, D_MHVK, dx_MHVC),
        HAS_GRADIENT=d_after_NHKV is not None,
        **settings,
    )
    grads = [torch.empty_like(t, memory_format=torch.contiguous_format) for t in x[:5]]
    dt_bias_MHK = q.new_empty(m, heads, k, dtype=torch.float32)
    A_log_MH = q.new_empty(m, heads, dtype=torch.float32)
    _gradients[(m * heads,)](
        *x[:7],
        *table.pointers,
        *(S_MHVK, D_MHVK, x_MHVC, dx_MHVC, o_THV, do_THV),
        *(*grads, A_log_MH, dt_bias_MHK),
        *(tensor.stride(0) for tensor in x[:5]),
        0.0 if x.lower_bound is None else x.lower_bound,
        **meta(x),
        **flags(x, table),
        num_warps=8,
    )
    return KDAGradients(*grads, A_log_MH.sum(0), dt_bias_MHK.sum(0), d_before)


@triton.jit
def _states(
    w_p,
    k_out_p,
    u_p,
    keep_p,
    first_p,
    before_p,
    S_p,
    x_p,
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
    DTYPE: tl.constexpr = w_p.dtype.element_ty
    row_C, k_ = tl.arange(0, C), tl.arange(0, K)
    v_ = (tl.program_id(0) % (V // BV)) * BV + tl.arange(0, BV)
    S_VK = tl.zeros([BV, K], tl.float32)
    if HAS_STATE:
        state_at = nh.to(tl.int64) * K * V + k_[None, :] * V + v_[:, None]
        S_VK += tl.load(before_p + state_at).to(tl.float32)
    for m in tl.range(tl.load(first_p + n), tl.load(first_p + n + 1), num_stages=3):
        tile = (m * H + h) * C
        w_KC = tl.load(w_p + tile * K + (k_[:, None] + row_C[None, :] * K))
        k_out_CK = tl.load(k_out_p + tile * K + (row_C[:, None] * K + k_[None, :]))
        u_VC = tl.load(u_p + tile * V + (v_[:, None] * C + row_C[None, :])).to(tl.float32)
        keep_K = tl.load(keep_p + (m * H + h) * K + k_)
        S = S_VK.to(DTYPE)
        tl.store(S_p + (m * H + h) * K * V + (v_[:, None] * K + k_[None, :]), S)
        x_VC = tl.dot(S, w_KC, u_VC, input_precision=PRECISION).to(DTYPE)
        tl.store(x_p + tile * V + (v_[:, None] * C + row_C[None, :]), x_VC)
        S_VK = tl.dot(x_VC, k_out_CK, S_VK * keep_K[None, :], input_precision=PRECISION)


@triton.jit
def _reverse(
    q_in_p,
    w_p,
    k_out_p,
    attn_p,
    keep_p,
    q_scale_p,
    do_p,
    start_p,
    length_p,
    first_p,
    d_after_p,
    d_before_p,
    D_p,
    dx_p,
    H: tl.constexpr,
    K: tl.constexpr,
    V: tl.constexpr,
    C: tl.constexpr,
    PRECISION: tl.constexpr,
    BV: tl.constexpr,
    HAS_GRADIENT: tl.constexpr,
):
    nh = tl.program_id(0) // (V // BV)
    n, h = nh // H, nh % H
    DTYPE: tl.constexpr = w_p.dtype.element_ty
    row_C, k_ = tl.arange(0, C), tl.arange(0, K)
    v_ = (tl.program_id(0) % (V // BV)) * BV + tl.arange(0, BV)
    state_at = nh.to(tl.int64) * K * V + k_[None, :] * V + v_[:, None]
    D_VK = tl.zeros([BV, K], tl.float32)
    if HAS_GRADIENT:
        D_VK += tl.load(d_after_p + state_at).to(tl.float32)
    first, end = tl.load(first_p + n), tl.load(first_p + n + 1)
    for i in tl.range(0, end - first, num_stages=3):
        m = end - 1 - i
        tile = (m * H + h) * C
        q_in_CK = tl.load(q_in_p + tile * K + (row_C[:, None] * K + k_[None, :]))
        w_CK = tl.load(w_p + tile * K + (row_C[:, None] * K + k_[None, :]))
        k_out_KC = tl.load(k_out_p + tile * K + (k_[:, None] + row_C[None, :] * K))
        attn_CC = tl.load(attn_p + tile * C + (row_C[None, :] * C + row_C[:, None]))
        keep_K = tl.load(keep_p + (m * H + h) * K + k_)
        q_scale_C = tl.load(q_scale_p + tile + row_C)
        start, length = tl.load(start_p + m), tl.load(length_p + m)
        do_at = (start + row_C)[None, :] * (H * V) + (h * V + v_)[:, None]
        do_VC = tl.load(do_p + do_at, mask=(row_C < length)[None, :], other=0.0).to(tl.float32)
        do_VC = (do_VC * q_scale_C[None, :]).to(DTYPE)

        D = D_VK.to(DTYPE)
        tl.store(D_p + (m * H + h) * K * V + (v_[:, None] * K + k_[None, :]), D)
        dx_VC = tl.dot(do_VC, attn_CC, input_precision=PRECISION)
        dx_VC = tl.dot(D, k_out_KC, dx_VC, input_precision=PRECISION).to(DTYPE)
        tl.store(dx_p + tile * V + (v_[:, None] * C + row_C[None, :]), dx_VC)
        D_VK = tl.dot(do_VC, q_in_CK, D_VK * keep_K[None, :], input_precision=PRECISION)
        D_VK = tl.dot(dx_VC, w_CK, D_VK, input_precision=PRECISION)
    tl.store(d_before_p + state_at, D_VK)


@triton.jit
def _gradients(
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
    S_p,
    D_p,
    x_p,
    dx_p,
    o_p,
    do_p,
    dq_p,
    dk_p,
    dv_p,
    dz_p,
    db_p,
    dA_log_p,
    d_dt_bias_p,
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
    DTYPE: tl.constexpr = S_p.dtype.element_ty
    start, length = tl.load(start_p + m), tl.load(length_p + m)
    row_C, k_, v_ = tl.arange(0, C), tl.arange(0, K), tl.arange(0, V)
    here_C = row_C < length
    valid_CC = row_C[:, None] >= row_C[None, :]
    carried_C = tl.where(here_C, 1.0, 0.0)
    kept_C = carried_C
    through = 1.0
    if SEGMENTED:
        document_C, carried_C, kept_C, through = documents(
            segment_p, carries_p, m, start, here_C, length, C
        )
        valid_CC = valid_CC & (document_C[:, None] == document_C[None, :])
    below_CC = valid_CC & (row_C[:, None] > row_C[None, :])

    # The chunk as the forward pass saw it.
    z_CK, g_CK, slope_CK = gates(
        z_p, z_stride, A_log_p, dt_bias_p, lower_bound, start, here_C, h, C, K, BOUNDED, PTX
    )
    G_CK = tl.cumsum(g_CK, axis=0)
    last_K = row(G_CK, C - 1, C)
    k_CK = rows_of(k_p, k_stride, start, here_C, h, C, K).to(tl.float32)
    k_norm_C = tl.rsqrt(tl.sum(k_CK * k_CK, axis=1) + L2_EPS)
    q_CK = rows_of(q_p, q_stride, start, here_C, h, C, K).to(tl.float32)
    q_norm_C = tl.rsqrt(tl.sum(q_CK * q_CK, axis=1) + L2_EPS)
    b_C = tl.load(b_p + (start + row_C) * b_stride + h, mask=here_C, other=0.0).to(tl.float32)
    beta_C = sigmoid(b_C, PTX)
    _, pairs_CC, _, k_in_CK, _ = scores(q_CK, k_CK, g_CK, G_CK, C, DTYPE, BOUNDED, PRECISION, PTX)
    k_in_CK *= carried_C[:, None]
    # Masked before anything multiplies it: above the diagonal a score may be infinite.
    pairs_CC = tl.where(below_CC, pairs_CC, 0.0) * k_norm_C[:, None] * k_norm_C[None, :]
    X_CC = inverse(pairs_CC * beta_C[:, None], C, PRECISION)

    # Through outputs and state: o = q_scale (q_in S + attn x), S' = keep S + k_out^T x.
    tile = tl.program_id(0).to(tl.int64) * C
    state_at = tl.program_id(0).to(tl.int64) * K * V + (v_[:, None] * K + k_[None, :])
    S_VK, D_VK = tl.load(S_p + state_at), tl.load(D_p + state_at)
    x_CV = tl.load(x_p + tile * V + (v_[None, :] * C + row_C[:, None]))
    o_at = (start + row_C)[:, None] * (H * V) + (h * V + v_)[None, :]
    do_CV = tl.load(do_p + o_at, mask=here_C[:, None], other=0.0).to(tl.float32)
    o_CV = tl.load(o_p + o_at, mask=here_C[:, None], other=0.0).to(tl.float32)
    dq_norm_C = tl.sum(do_CV * o_CV, axis=1)
    do = (do_CV * ((K**-0.5) * q_norm_C)[:, None]).to(DTYPE)
    d_attn_CC = tl.dot(do, tl.trans(x_CV), input_precision=PRECISION)
    own = row_C[:, None] == row_C[None, :]
    d_own_C = tl.sum(tl.where(own & here_C[:, None], d_attn_CC, 0.0), axis=1)
    d_attn_CC = tl.where(below_CC, d_attn_CC, 0.0)
    from_start_CK = exp2(G_CK, PTX) * carried_C[:, None]
    to_end_CK = exp2(last_K[None, :] - G_CK, PTX) * kept_C[:, None]
    dq_CK = tl.dot(do, S_VK, input_precision=PRECISION) * from_start_CK
    dk_out_CK = tl.dot(x_CV, D_VK, input_precision=PRECISION) * to_end_CK
    d_keep_K = tl.sum(S_VK.to(tl.float32) * D_VK.to(tl.float32), axis=0)
    # Log-decays by what follows them: the incoming state up to a token, and a key after it.
    dg_CK = tl.cumsum(dk_out_CK * k_CK, axis=0) - dk_out_CK * k_CK
    dg_CK += (d_keep_K * exp2(last_K, PTX) * through)[None, :]

    # Through what was written: x = k_norm X beta (v - k_norm k_in S).
    dx_CV = tl.load(dx_p + tile * V + (v_[None, :] * C + row_C[:, None])).to(tl.float32)
    v_CV = rows_of(v_p, v_stride, start, here_C, h, C, V)
    read_CV = tl.dot(k_in_CK.to(DTYPE), tl.trans(S_VK), input_precision=PRECISION)
    read_CV *= k_norm_C[:, None]
    e_CV = tl.dot(
        tl.trans(X_CC).to(DTYPE), (dx_CV * k_norm_C[:, None]).to(DTYPE), input_precision=PRECISION
    )
    dv_CV = e_CV * beta_C[:, None]
    tl.store(dv_p + o_at, dv_CV.to(dv_p.dtype.element_ty), mask=here_C[:, None])
    d_beta_C = tl.sum(e_CV * (v_CV.to(tl.float32) - read_CV), axis=1)
    x_wide = x_CV.to(tl.float32)
    dk_norm_C = tl.sum(dx_CV * x_wide, axis=1) - tl.sum(dv_CV * read_CV, axis=1)
    dk_in_CK = tl.dot((dv_CV * k_norm_C[:, None]).to(DTYPE), S_VK, input_precision=PRECISION)
    dk_in_CK *= -from_start_CK
    plain = (x_wide / k_norm_C[:, None]).to(DTYPE)
    dL_CC = -tl.dot(e_CV.to(DTYPE), tl.trans(plain), input_precision=PRECISION)
    dL_CC = tl.where(below_CC, dL_CC, 0.0)
    share_CC = dL_CC * pairs_CC
    d_beta_C += tl.sum(share_CC, axis=1)
    share_CC *= beta_C[:, None]
    dk_norm_C += tl.sum(share_CC, axis=1) + tl.sum(share_CC, axis=0)
    d_pairs_CC = dL_CC * (beta_C * k_norm_C)[:, None] * k_norm_C[None, :]

    # Through the scores, the decays and the norms.
    dg_CK += tl.cumsum(dq_CK * q_CK + dk_in_CK * k_CK, axis=0, reverse=True)
    dq_scores, dk_rows, dk_columns, dg_scores = score_gradients(
        d_attn_CC, d_pairs_CC, q_CK, k_CK, g_CK, G_CK, C, DTYPE, BOUNDED, PRECISION, PTX
    )
    dg_CK += dg_scores
    # A token's score with itself does not decay.
    dq_CK += dq_scores + d_own_C[:, None] * k_CK
    dk_CK = dk_in_CK + dk_rows + dk_out_CK + dk_columns + d_own_C[:, None] * q_CK
    dz_CK = tl.where(here_C[:, None], dg_CK * slope_CK, 0.0)
    dq_CK -= (dq_norm_C * q_norm_C * q_norm_C)[:, None] * q_CK
    dk_CK -= (dk_norm_C * k_norm_C * k_norm_C)[:, None] * k_CK
    at_CK = (start + row_C)[:, None] * (H * K) + (h * K + k_)[None, :]
    tl.store(dq_p + at_CK, dq_CK.to(dq_p.dtype.element_ty), mask=here_C[:, None])
    tl.store(dk_p + at_CK, dk_CK.to(dk_p.dtype.element_ty), mask=here_C[:, None])
    tl.store(dz_p + at_CK, dz_CK.to(dz_p.dtype.element_ty), mask=here_C[:, None])
    db_C = d_beta_C * beta_C * (1.0 - beta_C)
    tl.store(db_p + (start + row_C) * H + h, db_C.to(db_p.dtype.element_ty), mask=here_C)
    tl.store(d_dt_bias_p + tl.program_id(0) * K + k_, tl.sum(dz_CK, axis=0))
    if BOUNDED:
        by_rate_CK = dz_CK * z_CK
    else:
        by_rate_CK = dg_CK * g_CK * 0.6931471805599453
    tl.store(dA_log_p + tl.program_id(0), tl.sum(tl.sum(by_rate_CK, axis=0), axis=0))
