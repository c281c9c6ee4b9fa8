"""KDA in chunks, forward: every chunk is prepared at once, then the state runs through them.

Legend: M chunks of all sequences, C tokens of a chunk, N sequences, H heads, K key width, V value
width, T packed tokens.

A chunk maps the state S that comes in to its outputs and to the state that goes out:

    x   = solve v + w S             what it writes, [C, V]
    o   = q_in S + attn x
    S' <- keep S + k_out^T x

`_prepare` forms the six pieces in one pass over q, k, gates and beta (a program a chunk and head).
What a token writes is mostly beta times its own value, and beta, the diagonal of `solve`, is
rounded: x is therefore divided by beta over the rounded one, and `attn` and `k_out` are multiplied
by it before they are rounded themselves.
`_chain` does the rest, with the state transposed: it is then the left operand of every product and
never leaves the registers. Tiles have their rows in the order of `triton_chunk.token_order`.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from perilune.kernels.common.triton_math import dot_precision, exp2, uses_ptx
from perilune.kernels.kda.reference import L2_EPS
from perilune.kernels.kda.triton_chunk import (
    betas,
    decays,
    documents,
    fits,
    inverse,
    norm_of,
    rows_of,
    scores,
    token_order,
)
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
    """-solve k_in."""
    k_out_MHCK: Tensor
    attn_MHCC: Tensor
    solve_MHCC: Tensor
    """(I + L)^-1 beta with L = beta * scores of k, strictly lower triangular."""
    keep_MHK: Tensor


class Factors(NamedTuple):
    """What the backward pass needs besides."""

    x_3MHCK: Tensor
    """k down, k up and q up: about half of the chunk's decay; 0 where these leave the range."""
    scale_MHK: Tensor
    """The decay over half of the chunk; 1 where the factors are 0."""
    by_MHC: Tensor
    """beta over what it is rounded to."""


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


def prepare(x: KDAInputs, table: ChunkTable, factors: Factors | None = None) -> Tiles:
    """The pieces of every chunk; fills `factors`."""
    heads, k, _ = x.sizes
    m, q = table.num_chunks, x.q_THK
    tiles = Tiles(
        *(q.new_empty(m, heads, CHUNK, k) for _ in range(3)),
        *(q.new_empty(m, heads, CHUNK, CHUNK) for _ in range(2)),
        q.new_empty(m, heads, k, dtype=torch.float32),
    )
    _prepare[(m * heads,)](
        *(x.q_THK, x.k_THK, x.z_THK, x.b_TH, x.A_log_H, x.dt_bias_HK),
        *table.of_chunks,
        *tiles,
        *(tiles[:3] if factors is None else factors),
        *(tensor.stride(0) for tensor in (x.q_THK, x.k_THK, x.z_THK, x.b_TH)),
        m * heads,
        0.0 if x.lower_bound is None else x.lower_bound,
        **meta(x),
        **flags(x, table),
        KEPT=factors is not None,
        **warps(x, 128),
    )
    return tiles


def warps(x: KDAInputs, registers: int) -> dict[str, int]:
    """Four warps, of so many registers a thread where these can be capped: 128 let four programs
    share a multiprocessor, 168 three."""
    return {"num_warps": 4} | ({"maxnreg": registers} if uses_ptx(x.q_THK.device) else {})


def chain(
    x: KDAInputs,
    tiles: Tiles,
    of_pieces: tuple[Tensor, Tensor, Tensor],
    state_NHKV: Tensor | None,
    after_PHKV: Tensor | None = None,
    *,
    block: int | None = None,
) -> tuple[Tensor, Tensor]:
    """(outputs [T, H, V], fp32 states after each sequence); fills `after_PHKV` likewise."""
    heads, k, v = x.sizes
    n = of_pieces[2].shape[0] - 1
    o_THV = torch.empty_like(x.v_THV, memory_format=torch.contiguous_format)
    after = x.q_THK.new_empty(n, heads, k, v, dtype=torch.float32)
    columns = value_block(n * heads, v, block)
    _chain[(n * heads * (v // columns.size),)](
        *tiles,
        x.v_THV,
        *of_pieces,
        after if state_NHKV is None else state_NHKV,
        after,
        after if after_PHKV is None else after_PHKV,
        o_THV,
        x.v_THV.stride(0),
        **meta(x),
        BV=columns.size,
        HAS_STATE=state_NHKV is not None,
        PIECES=after_PHKV is not None,
        num_warps=columns.num_warps,
    )
    return o_THV, after


class ValueBlock(NamedTuple):
    size: int
    num_warps: int


def value_block(num_chains: int, v: int, size: int | None = None) -> ValueBlock:
    """Value columns of one program: all of them in two warp groups when there are enough chains to
    occupy a card, half of them otherwise; or `size`, where there are so many."""
    if size is None:
        size = 128 if num_chains >= 96 else 64
    return ValueBlock(128, 8) if min(size, v) == 128 else ValueBlock(min(v, 64), 4)


@triton.jit
def _prepare(
    q_p,
    k_p,
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
    attn_p,
    solve_p,
    keep_p,
    factors_p,
    scale_p,
    by_p,
    q_stride,
    k_stride,
    z_stride,
    b_stride,
    num_tiles,
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
    KEPT: tl.constexpr,
):
    m, h = tl.program_id(0) // H, tl.program_id(0) % H
    DTYPE: tl.constexpr = q_in_p.dtype.element_ty
    start, length = tl.load(start_p + m), tl.load(length_p + m)
    row_C, k_ = tl.arange(0, C), tl.arange(0, K)
    t_C = token_order(C)
    here_C = t_C < length
    valid_CC = t_C[:, None] >= t_C[None, :]
    if SEGMENTED:
        document_C, carried_C, kept_C, through = documents(
            segment_p, carries_p, m, start, t_C, here_C, length
        )
        valid_CC = valid_CC & (document_C[:, None] == document_C[None, :])

    g_CK, G_CK, half_K = decays(
        z_p, z_stride, A_log_p, dt_bias_p, lower_bound, start, t_C, here_C, h, C, K, BOUNDED, PTX
    )
    factored = True if BOUNDED else fits(G_CK, half_K)
    centred_CK = G_CK - half_K[None, :]
    tile = tl.program_id(0).to(tl.int64) * C
    at_CK = tile * K + row_C[:, None] * K + k_[None, :]
    keep_K = exp2(2.0 * half_K, PTX)
    if SEGMENTED:
        keep_K *= through
    tl.store(keep_p + tl.program_id(0) * K + k_, keep_K)

    b_C = tl.load(b_p + (start + t_C) * b_stride + h, mask=here_C, other=0.0).to(tl.float32)
    beta_C, by_C, over_C = betas(b_C, DTYPE, PTX)

    # The order of what follows keeps few tiles alive at a time.
    k_CK = rows_of(k_p, k_stride, start, t_C, here_C, h, K).to(tl.float32)
    k_CK *= norm_of(k_CK, L2_EPS)[:, None]
    k_down = k_CK * exp2(-centred_CK, PTX)
    k_out_CK = _shifted(k_down, k_CK, 2.0 * half_K[None, :] - G_CK, half_K, BOUNDED, PTX)
    if SEGMENTED:
        k_out_CK *= kept_C[:, None]
    tl.store(k_out_p + at_CK, (k_out_CK * by_C[:, None]).to(DTYPE))
    up_CK = exp2(centred_CK, PTX)
    k_up = (k_CK * up_CK).to(DTYPE)
    k_down_KC = tl.trans(k_down.to(DTYPE))
    pairs_CC = scores(k_up, k_down_KC, k_CK, k_CK, g_CK, t_C, factored, C, BOUNDED, PRECISION, PTX)

    q_CK = rows_of(q_p, q_stride, start, t_C, here_C, h, K).to(tl.float32)
    q_CK *= ((K**-0.5) * norm_of(q_CK, L2_EPS))[:, None]
    q_up = q_CK * up_CK
    attn_CC = scores(
        q_up.to(DTYPE), k_down_KC, q_CK, k_CK, g_CK, t_C, factored, C, BOUNDED, PRECISION, PTX
    )
    if KEPT:
        zero = tl.zeros([C, K], DTYPE)
        tiles = num_tiles.to(tl.int64) * C * K
        k_down = tl.trans(k_down_KC)
        tl.store(factors_p + at_CK, k_down if factored else zero)
        tl.store(factors_p + tiles + at_CK, k_up if factored else zero)
        tl.store(factors_p + 2 * tiles + at_CK, q_up.to(DTYPE) if factored else zero)
        scale_K = exp2(half_K, PTX) if factored else tl.full([K], 1.0, tl.float32)
        tl.store(scale_p + tl.program_id(0) * K + k_, scale_K)
        tl.store(by_p + tile + row_C, by_C)
    q_in_CK = _shifted(q_up, q_CK, G_CK, half_K, BOUNDED, PTX)
    if SEGMENTED:
        q_in_CK *= carried_C[:, None]
    tl.store(q_in_p + at_CK, q_in_CK.to(DTYPE))
    attn_CC = tl.where(valid_CC, attn_CC * by_C[None, :], 0.0)
    at_CC = tile * C + row_C[:, None] * C + row_C[None, :]
    tl.store(attn_p + at_CC, attn_CC.to(DTYPE))

    below_CC = valid_CC & (t_C[:, None] > t_C[None, :])
    X_CC = inverse(tl.where(below_CC, pairs_CC * beta_C[:, None], 0.0), t_C, DTYPE, PRECISION)
    solve = (X_CC * beta_C[None, :] * over_C[:, None]).to(DTYPE)
    tl.store(solve_p + at_CC, solve)
    if BOUNDED and not SEGMENTED:
        w_CK = tl.dot(solve, k_up, input_precision=PRECISION) * -exp2(half_K, PTX)[None, :]
    else:
        k_in_CK = k_CK * exp2(G_CK, PTX)
        if SEGMENTED:
            k_in_CK *= carried_C[:, None]
        w_CK = -tl.dot(solve, k_in_CK.to(DTYPE), input_precision=PRECISION)
    tl.store(w_p + at_CK, w_CK.to(DTYPE))


@triton.jit
def _shifted(factored_CK, x_CK, by_CK, half_K, BOUNDED: tl.constexpr, PTX: tl.constexpr):
    """x exp2(by), through the factor about half of the sum where that is in range."""
    if BOUNDED:
        return factored_CK * exp2(half_K, PTX)[None, :]
    else:
        return x_CK * exp2(by_CK, PTX)


@triton.jit
def _chain(
    q_in_p,
    w_p,
    k_out_p,
    attn_p,
    solve_p,
    keep_p,
    v_p,
    start_p,
    chunk_p,
    piece_p,
    before_p,
    after_p,
    after_piece_p,
    o_p,
    v_stride,
    H: tl.constexpr,
    K: tl.constexpr,
    V: tl.constexpr,
    C: tl.constexpr,
    PRECISION: tl.constexpr,
    BV: tl.constexpr,
    HAS_STATE: tl.constexpr,
    PIECES: tl.constexpr,
):
    nh = tl.program_id(0) // (V // BV)
    n, h = nh // H, nh % H
    DTYPE: tl.constexpr = q_in_p.dtype.element_ty
    row_C, k_, t_C = tl.arange(0, C), tl.arange(0, K), token_order(C)
    v_ = (tl.program_id(0) % (V // BV)) * BV + tl.arange(0, BV)
    state_at = nh.to(tl.int64) * K * V + k_[None, :] * V + v_[:, None]
    S_VK = tl.zeros([BV, K], tl.float32)
    if HAS_STATE:
        S_VK += tl.load(before_p + state_at).to(tl.float32)
    for p in range(tl.load(piece_p + n), tl.load(piece_p + n + 1)):
        start, end = tl.load(start_p + p), tl.load(start_p + p + 1)
        first = tl.load(chunk_p + p)
        for i in tl.range(0, tl.cdiv(end - start, C), num_stages=3):
            tile = ((first + i) * H + h) * C
            at_KC = tile * K + k_[:, None] + row_C[None, :] * K
            at_CC = tile * C + row_C[:, None] + row_C[None, :] * C
            token_C = start + i * C + t_C
            here_C1 = (token_C < end)[:, None]
            v_at = token_C[:, None] * v_stride + (h * V + v_)[None, :]
            v_CV = tl.load(v_p + v_at, mask=here_C1, other=0.0).to(DTYPE)
            solve_CC, attn_CC = tl.load(solve_p + at_CC), tl.load(attn_p + at_CC)
            w_KC, q_in_KC = tl.load(w_p + at_KC), tl.load(q_in_p + at_KC)
            k_out_CK = tl.load(k_out_p + tile * K + (row_C[:, None] * K + k_[None, :]))
            keep_K = tl.load(keep_p + ((first + i) * H + h) * K + k_)

            S = S_VK.to(DTYPE)
            x_VC = tl.dot(tl.trans(v_CV), solve_CC, input_precision=PRECISION)
            x_VC = tl.dot(S, w_KC, x_VC, input_precision=PRECISION).to(DTYPE)
            o_VC = tl.dot(S, q_in_KC, input_precision=PRECISION)
            o_VC = tl.dot(x_VC, attn_CC, o_VC, input_precision=PRECISION)
            S_VK = tl.dot(x_VC, k_out_CK, S_VK * keep_K[None, :], input_precision=PRECISION)

            o_CV = tl.trans(o_VC).to(o_p.dtype.element_ty)
            tl.store(o_p + token_C[:, None] * (H * V) + (h * V + v_)[None, :], o_CV, mask=here_C1)
        if PIECES:
            piece_at = (p * H + h) * K * V + k_[None, :] * V + v_[:, None]
            tl.store(after_piece_p + piece_at, S_VK)
    tl.store(after_p + state_at, S_VK)
