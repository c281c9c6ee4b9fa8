"""What one chunk of KDA needs, from its inputs: shared by the forward and the backward pass.

Legend: C tokens of a chunk, K key width, V value width.

With G the running sum of the log2-decays inside the chunk, a score of tokens i >= j needs
exp2(G_i - G_j). It is taken as a product of two factors about the middle of the chunk. The bounded
gate sums to at most 160 nats in 32 tokens, so that the factors stay within e^80, inside the range
of bf16 and fp32. An unbounded gate may leave it: then the pairs are formed one by one.
"""

from __future__ import annotations

import triton
import triton.language as tl

from perilune.kernels.common.triton_math import LOG2_E, exp2, sigmoid

LARGEST_FACTOR = tl.constexpr(116.0)
"""log2. A bounded chunk reaches 115.4; products with unit vectors stay below the largest fp32."""


@triton.jit
def log2_decay(z_CK, rate, lower_bound, BOUNDED: tl.constexpr, PTX: tl.constexpr):
    """(log2 of the decay, derivative of its natural log by z); `z_CK` holds dt_bias already."""
    if BOUNDED:
        s_CK = sigmoid(z_CK * rate, PTX)
        g_CK = lower_bound * s_CK
        slope_CK = g_CK * (1.0 - s_CK) * rate
    else:
        soft_CK = tl.where(z_CK > 20.0, z_CK, tl.log(1.0 + tl.exp(tl.minimum(z_CK, 20.0))))
        g_CK = -rate * soft_CK
        slope_CK = -rate * sigmoid(z_CK, PTX)
    return g_CK * LOG2_E, slope_CK


@triton.jit
def rows_of(x_p, stride, start, here_C, h, C: tl.constexpr, WIDTH: tl.constexpr):
    """A chunk's rows of head h, [C, WIDTH] in the dtype of x; zero past its tokens."""
    at = tl.arange(0, C)[:, None] * stride + (h * WIDTH + tl.arange(0, WIDTH))[None, :]
    return tl.load(x_p + start * stride + at, mask=here_C[:, None], other=0.0)


@triton.jit
def gates(
    z_p,
    stride,
    A_log_p,
    dt_bias_p,
    lower_bound,
    start,
    here_C,
    h,
    C: tl.constexpr,
    K: tl.constexpr,
    BOUNDED: tl.constexpr,
    PTX: tl.constexpr,
):
    """z with dt_bias, the log2-decays, and the slope of `log2_decay`; [C, K] each."""
    z_CK = rows_of(z_p, stride, start, here_C, h, C, K).to(tl.float32)
    z_CK += tl.load(dt_bias_p + h * K + tl.arange(0, K)).to(tl.float32)[None, :]
    rate = tl.exp(tl.load(A_log_p + h).to(tl.float32))
    g_CK, slope_CK = log2_decay(z_CK, rate, lower_bound, BOUNDED, PTX)
    return z_CK, tl.where(here_C[:, None], g_CK, 0.0), slope_CK


@triton.jit
def row(x_CK, index, C: tl.constexpr):
    """Row `index` of a tile."""
    return tl.sum(tl.where(tl.arange(0, C)[:, None] == index, x_CK, 0.0), axis=0)


@triton.jit
def _fits(G_CK, middle_K):
    return tl.max(tl.max(tl.abs(G_CK - middle_K[None, :]), axis=0), axis=0) <= LARGEST_FACTOR


@triton.jit
def scores(
    q_CK,
    k_CK,
    g_CK,
    G_CK,
    C: tl.constexpr,
    DTYPE: tl.constexpr,
    BOUNDED: tl.constexpr,
    PRECISION: tl.constexpr,
    PTX: tl.constexpr,
):
    """sum_k x_i k_j exp2(G_i - G_j) with x = q and x = k, [C, C], valid on and below the diagonal;
    and q exp2(G), k exp2(G), k exp2(last - G)."""
    middle_K = row(G_CK, C // 2 - 1, C)
    last_K = row(G_CK, C - 1, C)
    if BOUNDED:
        up_CK = exp2(G_CK - middle_K[None, :], PTX)
        q_up, k_up = q_CK * up_CK, k_CK * up_CK
        k_down = k_CK * exp2(middle_K[None, :] - G_CK, PTX)
        k_down_KC = tl.trans(k_down.to(DTYPE))
        attn_CC = tl.dot(q_up.to(DTYPE), k_down_KC, input_precision=PRECISION)
        pairs_CC = tl.dot(k_up.to(DTYPE), k_down_KC, input_precision=PRECISION)
        start_K = exp2(middle_K, PTX)[None, :]
        end_K = exp2(last_K - middle_K, PTX)[None, :]
        return attn_CC, pairs_CC, q_up * start_K, k_up * start_K, k_down * end_K
    else:
        if _fits(G_CK, middle_K):
            up_CK = exp2(G_CK - middle_K[None, :], PTX)
            k_down_KC = tl.trans((k_CK * exp2(middle_K[None, :] - G_CK, PTX)).to(DTYPE))
            attn_CC = tl.dot((q_CK * up_CK).to(DTYPE), k_down_KC, input_precision=PRECISION)
            pairs_CC = tl.dot((k_CK * up_CK).to(DTYPE), k_down_KC, input_precision=PRECISION)
        else:
            attn_CC, pairs_CC = _scores_by_pairs(q_CK, k_CK, g_CK, C, PTX)
        start_CK = exp2(G_CK, PTX)
        k_out_CK = k_CK * exp2(last_K[None, :] - G_CK, PTX)
        return attn_CC, pairs_CC, q_CK * start_CK, k_CK * start_CK, k_out_CK


@triton.jit
def _scores_by_pairs(q_CK, k_CK, g_CK, C: tl.constexpr, PTX: tl.constexpr):
    column_C = tl.arange(0, C)
    attn_CC = tl.zeros([C, C], tl.float32)
    pairs_CC = tl.zeros([C, C], tl.float32)
    gap_CK = tl.zeros_like(q_CK)
    for back in range(C):
        j = C - 1 - back
        gap_CK = _gap(gap_CK, g_CK, j, C)
        decayed_CK = row(k_CK, j, C)[None, :] * exp2(gap_CK, PTX)
        here = column_C[None, :] == j
        attn_CC = tl.where(here, tl.sum(q_CK * decayed_CK, axis=1)[:, None], attn_CC)
        pairs_CC = tl.where(here, tl.sum(k_CK * decayed_CK, axis=1)[:, None], pairs_CC)
    return attn_CC, pairs_CC


@triton.jit
def _gap(gap_CK, g_CK, j, C: tl.constexpr):
    """sum of g over j+1 .. i from the same over j+2 .. i, zero for i <= j: no difference of large
    sums is taken."""
    later = tl.arange(0, C)[:, None] > j
    return tl.where(later, gap_CK + row(g_CK, j + 1, C)[None, :], 0.0)


@triton.jit
def score_gradients(
    d_attn_CC,
    d_pairs_CC,
    q_CK,
    k_CK,
    g_CK,
    G_CK,
    C: tl.constexpr,
    DTYPE: tl.constexpr,
    BOUNDED: tl.constexpr,
    PRECISION: tl.constexpr,
    PTX: tl.constexpr,
):
    """Through `scores`: gradients of q, of k as x, of k as k, and of the log-decays; [C, K] each.
    The gradients of the scores must be zero on and above the diagonal."""
    middle_K = row(G_CK, C // 2 - 1, C)
    if BOUNDED:
        return _factored_gradients(
            d_attn_CC, d_pairs_CC, q_CK, k_CK, G_CK - middle_K[None, :], DTYPE, PRECISION, PTX
        )
    else:
        if _fits(G_CK, middle_K):
            dq_CK, dx_CK, dk_CK, dg_CK = _factored_gradients(
                d_attn_CC, d_pairs_CC, q_CK, k_CK, G_CK - middle_K[None, :], DTYPE, PRECISION, PTX
            )
        else:
            dq_CK, dx_CK, dk_CK, dg_CK = _gradients_by_pairs(
                d_attn_CC, d_pairs_CC, q_CK, k_CK, g_CK, C, PTX
            )
        return dq_CK, dx_CK, dk_CK, dg_CK


@triton.jit
def _factored_gradients(
    d_attn_CC,
    d_pairs_CC,
    q_CK,
    k_CK,
    G_CK,
    DTYPE: tl.constexpr,
    PRECISION: tl.constexpr,
    PTX: tl.constexpr,
):
    up_CK, down_CK = exp2(G_CK, PTX), exp2(-G_CK, PTX)
    k_down = (k_CK * down_CK).to(DTYPE)
    d_attn, d_pairs = d_attn_CC.to(DTYPE), d_pairs_CC.to(DTYPE)
    dq_CK = tl.dot(d_attn, k_down, input_precision=PRECISION) * up_CK
    dx_CK = tl.dot(d_pairs, k_down, input_precision=PRECISION) * up_CK
    q_up, k_up = (q_CK * up_CK).to(DTYPE), (k_CK * up_CK).to(DTYPE)
    dk_CK = tl.dot(tl.trans(d_attn), q_up, input_precision=PRECISION)
    dk_CK = tl.dot(tl.trans(d_pairs), k_up, dk_CK, input_precision=PRECISION) * down_CK
    # A token's decay is part of every later running sum.
    dg_CK = tl.cumsum(dq_CK * q_CK + (dx_CK - dk_CK) * k_CK, axis=0, reverse=True)
    return dq_CK, dx_CK, dk_CK, dg_CK


@triton.jit
def _gradients_by_pairs(
    d_attn_CC, d_pairs_CC, q_CK, k_CK, g_CK, C: tl.constexpr, PTX: tl.constexpr
):
    column_C = tl.arange(0, C)
    dq_CK = tl.zeros_like(q_CK)
    dx_CK = tl.zeros_like(q_CK)
    dk_CK = tl.zeros_like(q_CK)
    dg_CK = tl.zeros_like(q_CK)
    gap_CK = tl.zeros_like(q_CK)
    for back in range(C):
        j = C - 1 - back
        gap_CK = _gap(gap_CK, g_CK, j, C)
        decay_CK = exp2(gap_CK, PTX)
        here = column_C[None, :] == j
        d_attn_C = tl.sum(tl.where(here, d_attn_CC, 0.0), axis=1)[:, None]
        d_pairs_C = tl.sum(tl.where(here, d_pairs_CC, 0.0), axis=1)[:, None]
        k_decayed = row(k_CK, j, C)[None, :] * decay_CK
        dq_CK += d_attn_C * k_decayed
        dx_CK += d_pairs_C * k_decayed
        by_key_CK = (d_attn_C * q_CK + d_pairs_C * k_CK) * decay_CK
        dk_K = tl.sum(by_key_CK, axis=0)
        dk_CK = tl.where(column_C[:, None] == j, dk_K[None, :], dk_CK)
        by_gap_CK = tl.cumsum(by_key_CK * row(k_CK, j, C)[None, :], axis=0, reverse=True)
        dg_CK += tl.where(column_C[:, None] > j, by_gap_CK, 0.0)
    return dq_CK, dx_CK, dk_CK, dg_CK


@triton.jit
def inverse(L_CC, C: tl.constexpr, PRECISION: tl.constexpr):
    """(I + L)^-1 of a strictly lower triangular L [C, C], C = 16, 32 or 64.

    The blocks of 2 on the diagonal are inverted by hand; then pairs of neighbouring blocks A and B
    are joined, [[A, 0], [-B L_BA A, B]], until one is left. As stable as substitution.
    """
    row_C = tl.arange(0, C)
    eye_CC = tl.where(row_C[:, None] == row_C[None, :], 1.0, 0.0)
    X_CC = eye_CC - tl.where(row_C[:, None] // 2 == row_C[None, :] // 2, L_CC, 0.0)
    X_CC = _join(X_CC, L_CC, 2, C, PRECISION)
    X_CC = _join(X_CC, L_CC, 4, C, PRECISION)
    X_CC = _join(X_CC, L_CC, 8, C, PRECISION)
    if C > 16:
        X_CC = _join(X_CC, L_CC, 16, C, PRECISION)
    if C > 32:
        X_CC = _join(X_CC, L_CC, 32, C, PRECISION)
    return X_CC


@triton.jit
def _join(X_CC, L_CC, SIZE: tl.constexpr, C: tl.constexpr, PRECISION: tl.constexpr):
    row_C = tl.arange(0, C)
    pair = row_C[:, None] // (2 * SIZE) == row_C[None, :] // (2 * SIZE)
    below_CC = tl.where(pair & (row_C[:, None] // SIZE != row_C[None, :] // SIZE), L_CC, 0.0)
    Y_CC = tl.dot(below_CC, X_CC, input_precision=PRECISION)
    return X_CC - tl.dot(X_CC, Y_CC, input_precision=PRECISION)


@triton.jit
def documents(segment_p, carries_p, m, start, here_C, length, C: tl.constexpr):
    """Of chunk m in a row of documents: each token's document; 1.0 where that is the one of the
    incoming state, and where it is the one that goes out; 1.0 if the incoming state goes out."""
    document_C = tl.load(segment_p + start + tl.arange(0, C), mask=here_C, other=-1)
    final = tl.load(segment_p + start + length - 1)
    # No token before the first chunk of a row: nothing is carried into it.
    before = tl.load(segment_p + start - 1, mask=tl.load(carries_p + m) != 0, other=-2)
    carried_C = tl.where(document_C == before, 1.0, 0.0)
    kept_C = tl.where(document_C == final, 1.0, 0.0)
    return document_C, carried_C, kept_C, tl.where(final == before, 1.0, 0.0)
