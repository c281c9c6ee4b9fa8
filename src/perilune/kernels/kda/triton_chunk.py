"""What one chunk of KDA needs, from its inputs: shared by the forward and the backward pass.

Legend: C tokens of a chunk, K key width, V value width, N runs of `RUN` tokens.

With G the running sum of the log2-decays inside the chunk, a score of tokens i >= j needs
exp2(G_i - G_j). It is taken as a product of two factors about half of the chunk's sum. The bounded
gate sums to at most 160 nats in 32 tokens, so that the factors stay within e^80, inside the range
of bf16 and fp32. An unbounded gate may leave it: then the pairs are formed one by one.

The rows of every tile are in `token_order`. A thread that holds every (C / RUN)-th row, as the
layout of wide loads has it, then holds runs of consecutive tokens, and a running sum needs few
exchanges between threads.
"""

from __future__ import annotations

import triton
import triton.language as tl

from perilune.kernels.common.triton_math import LOG2_E, exp2, reciprocal, sigmoid

RUN: tl.constexpr = tl.constexpr(4)
LARGEST_FACTOR = tl.constexpr(116.0)
"""log2. A bounded chunk reaches 115.4; products with unit vectors stay below the largest fp32."""


@triton.jit
def token_order(C: tl.constexpr):
    """The token of every row of a tile."""
    row_C = tl.arange(0, C)
    return (row_C % (C // RUN)) * RUN + row_C // (C // RUN)


@triton.jit
def running_sum(x_CK, C: tl.constexpr, K: tl.constexpr, REVERSE: tl.constexpr = False):
    """Over the tokens up to each row's (REVERSE: from it on, slow), itself included."""
    x_RNK = tl.reshape(x_CK, (RUN, C // RUN, K))
    inside_RNK = tl.cumsum(x_RNK, axis=0, reverse=REVERSE)
    sum_NK = tl.sum(x_RNK, axis=0)
    _, before_NK = tl.associative_scan((sum_NK, tl.zeros_like(sum_NK)), 0, _append, REVERSE)
    return tl.reshape(inside_RNK + before_NK[None, :, :], (C, K))


@triton.jit
def _append(sum_a, before_a, sum_b, before_b):
    """Of two neighbouring stretches: their sum, and the sum of all that precedes the last item."""
    return sum_a + sum_b, sum_a + before_b


@triton.jit
def rows_of(x_p, stride, start, t_C, here_C, h, WIDTH: tl.constexpr):
    """A chunk's rows of head h, [C, WIDTH] in the dtype of x; zero past its tokens."""
    at = t_C[:, None] * stride + (h * WIDTH + tl.arange(0, WIDTH))[None, :]
    return tl.load(x_p + start * stride + at, mask=here_C[:, None], other=0.0)


@triton.jit
def betas(b_C, DTYPE: tl.constexpr, PTX: tl.constexpr):
    """beta, beta over what it is rounded to, and the inverse of that: 1 where beta is nothing."""
    beta_C = sigmoid(b_C, PTX)
    rounded_C = beta_C.to(DTYPE).to(tl.float32)
    some_C = rounded_C > 1e-30
    by_C = tl.where(some_C, beta_C * reciprocal(rounded_C, PTX), 1.0)
    return beta_C, by_C, tl.where(some_C, rounded_C * reciprocal(beta_C, PTX), 1.0)


@triton.jit
def rest_of(x_CC, rounded_CC):
    """What rounding took from x, in the dtype it was rounded to: together, twice the digits."""
    return (x_CC - rounded_CC.to(tl.float32)).to(rounded_CC.dtype)


@triton.jit
def norm_of(x_CK, EPS: tl.constexpr):
    """1 / the L2 norm of each row."""
    return tl.rsqrt(tl.sum(x_CK * x_CK, axis=1) + EPS)


@triton.jit
def gates(
    z_p,
    stride,
    A_log_p,
    dt_bias_p,
    lower_bound,
    start,
    t_C,
    here_C,
    h,
    K: tl.constexpr,
    BOUNDED: tl.constexpr,
    PTX: tl.constexpr,
):
    """z with dt_bias; the log2-decays, 0 past the tokens; d of their natural logs by d z; [C, K]
    each."""
    z_CK = rows_of(z_p, stride, start, t_C, here_C, h, K).to(tl.float32)
    dt_bias_K = tl.load(dt_bias_p + h * K + tl.arange(0, K)).to(tl.float32)
    rate = tl.exp(tl.load(A_log_p + h).to(tl.float32))
    biased_CK = z_CK + dt_bias_K[None, :]
    if BOUNDED:
        # Few operations: scalars and rows take all factors.
        by = -LOG2_E * rate
        s_CK = reciprocal(1.0 + exp2(z_CK * by + (dt_bias_K * by)[None, :], PTX), PTX)
        g_CK = s_CK * tl.where(here_C, lower_bound * LOG2_E, 0.0)[:, None]
        slope_CK = s_CK * (1.0 - s_CK) * (lower_bound * rate)
    else:
        soft_CK = tl.log(1.0 + tl.exp(tl.minimum(biased_CK, 20.0)))
        soft_CK = tl.where(biased_CK > 20.0, biased_CK, soft_CK)
        g_CK = tl.where(here_C[:, None], soft_CK * (-rate * LOG2_E), 0.0)
        slope_CK = -rate * sigmoid(biased_CK, PTX)
    return biased_CK, g_CK, slope_CK


@triton.jit
def decays(
    z_p,
    stride,
    A_log_p,
    dt_bias_p,
    lower_bound,
    start,
    t_C,
    here_C,
    h,
    C: tl.constexpr,
    K: tl.constexpr,
    BOUNDED: tl.constexpr,
    PTX: tl.constexpr,
):
    """The log2-decays and their running sums, [C, K] each, and half of the last sums, [K]."""
    _, g_CK, _ = gates(
        z_p, stride, A_log_p, dt_bias_p, lower_bound, start, t_C, here_C, h, K, BOUNDED, PTX
    )
    G_CK = running_sum(g_CK, C, K)
    # Log-decays are never positive: the least is the last.
    return g_CK, G_CK, 0.5 * tl.min(G_CK, axis=0)


@triton.jit
def fits(G_CK, half_K):
    """Whether the factors of the scores are in range."""
    largest_K = tl.max(tl.abs(G_CK - half_K[None, :]), axis=0)
    return tl.max(largest_K, axis=0) <= LARGEST_FACTOR


@triton.jit
def scores(
    x_up,
    k_down_KC,
    x_CK,
    k_CK,
    g_CK,
    t_C,
    factored,
    C: tl.constexpr,
    BOUNDED: tl.constexpr,
    PRECISION: tl.constexpr,
    PTX: tl.constexpr,
):
    """sum_k x_i k_j exp2(G_i - G_j), [C, C], valid where token i is not before token j."""
    if BOUNDED:
        return tl.dot(x_up, k_down_KC, input_precision=PRECISION)
    else:
        if factored:
            scores_CC = tl.dot(x_up, k_down_KC, input_precision=PRECISION)
        else:
            scores_CC = _scores_by_pairs(x_CK, k_CK, g_CK, t_C, C, PTX)
        return scores_CC


@triton.jit
def _scores_by_pairs(x_CK, k_CK, g_CK, t_C, C: tl.constexpr, PTX: tl.constexpr):
    scores_CC = tl.zeros([C, C], tl.float32)
    gap_CK = tl.zeros_like(x_CK)
    for back in range(C):
        j = C - 1 - back
        gap_CK = gap_after(gap_CK, g_CK, t_C, j)
        decayed_CK = row_of(k_CK, t_C, j)[None, :] * exp2(gap_CK, PTX)
        score_C = tl.sum(x_CK * decayed_CK, axis=1)
        scores_CC = tl.where(t_C[None, :] == j, score_C[:, None], scores_CC)
    return scores_CC


@triton.jit
def row_of(x_CK, t_C, t):
    """The row of token t."""
    return tl.sum(tl.where(t_C[:, None] == t, x_CK, 0.0), axis=0)


@triton.jit
def gap_after(gap_CK, g_CK, t_C, j):
    """sum of g over j+1 .. i from the same over j+2 .. i, zero for i <= j: no difference of large
    sums is taken."""
    return tl.where(t_C[:, None] > j, gap_CK + row_of(g_CK, t_C, j + 1)[None, :], 0.0)


@triton.jit
def inverse(L_CC, t_C, DTYPE: tl.constexpr, PRECISION: tl.constexpr):
    """(I + L)^-1 of a strictly lower triangular L [C, C], C = 32.

    The blocks of 2 on the diagonal are inverted by hand; then pairs of neighbouring blocks A and B
    are joined, [[A, 0], [-B L_BA A, B]], until one is left. As stable as substitution. Scores of
    unit keys keep every entry of L and of the inverse within 1: half precision then means fp16,
    whose 11 bits are those of tf32.
    """
    HALF: tl.constexpr = tl.float16 if tl.bfloat16 == DTYPE else DTYPE
    eye_CC = tl.where(t_C[:, None] == t_C[None, :], 1.0, 0.0)
    X_CC = eye_CC - tl.where(t_C[:, None] // 2 == t_C[None, :] // 2, L_CC, 0.0)
    X_CC = _join(X_CC, L_CC, t_C, 2, HALF, PRECISION)
    X_CC = _join(X_CC, L_CC, t_C, 4, HALF, PRECISION)
    X_CC = _join(X_CC, L_CC, t_C, 8, HALF, PRECISION)
    return _join(X_CC, L_CC, t_C, 16, HALF, PRECISION)


@triton.jit
def _join(X_CC, L_CC, t_C, SIZE: tl.constexpr, DTYPE: tl.constexpr, PRECISION: tl.constexpr):
    pair = t_C[:, None] // (2 * SIZE) == t_C[None, :] // (2 * SIZE)
    below_CC = tl.where(pair & (t_C[:, None] // SIZE != t_C[None, :] // SIZE), L_CC, 0.0)
    X = X_CC.to(DTYPE)
    Y_CC = tl.dot(below_CC.to(DTYPE), X, input_precision=PRECISION)
    return X_CC - tl.dot(X, Y_CC.to(DTYPE), input_precision=PRECISION)


@triton.jit
def documents(segment_p, carries_p, m, start, t_C, here_C, length):
    """Of chunk m in a row of documents: each token's document; 1.0 where that is the one of the
    incoming state, and where it is the one that goes out; 1.0 if the incoming state goes out."""
    document_C = tl.load(segment_p + start + t_C, mask=here_C, other=-1)
    final = tl.load(segment_p + start + length - 1)
    # No token before the first chunk of a row: nothing is carried into it.
    before = tl.load(segment_p + start - 1, mask=tl.load(carries_p + m) != 0, other=-2)
    carried_C = tl.where(document_C == before, 1.0, 0.0)
    kept_C = tl.where(document_C == final, 1.0, 0.0)
    return document_C, carried_C, kept_C, tl.where(final == before, 1.0, 0.0)
