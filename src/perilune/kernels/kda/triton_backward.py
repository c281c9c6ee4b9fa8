"""KDA in chunks, backward. Nothing but the inputs is kept from the forward pass.

Legend: M chunks of all sequences, C tokens of a chunk, N sequences, H heads, K key width, V value
width, T packed tokens.

`_states` repeats the chain and keeps each chunk's incoming state S and what it wrote, x. `_reverse`
runs the gradient D of the outgoing state from the last chunk to the first:

    dx  = attn^T do + k_out D,      dv = solve^T dx
    D  <- keep D + q_in^T do + w^T dx

x, dx and dv are kept in two numbers of the inputs' dtype, the rounded one and the rest: their
rounding would be half of the error of the gradients. x is divided by beta over the rounded beta, as
in the forward pass, and dx multiplied.

`triton_gradients` turns S, D, x and dv into the other gradients, every chunk by itself.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from perilune.kernels.kda.triton_chunk import rest_of, token_order
from perilune.kernels.kda.triton_forward import Factors, KDAInputs, meta, prepare, value_block
from perilune.kernels.kda.triton_gradients import Chunks, gradients
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
    do_THV: Tensor,
    d_after_NHKV: Tensor | None,
    *,
    block: int | None = None,
) -> KDAGradients:
    """Gradients of every input, of the gate's parameters and of the initial state."""
    heads, k, v = x.sizes
    m, n, q = table.num_chunks, table.num_sequences, x.q_THK
    wide = {"dtype": torch.float32}
    factors = Factors(
        q.new_empty(3, m, heads, CHUNK, k),
        *(q.new_empty(m, heads, size, **wide) for size in (k, CHUNK)),
    )
    tiles = prepare(x, table, factors)
    columns = value_block(n * heads, v, block)
    grid = (n * heads * (v // columns.size),)
    settings = meta(x) | {"BV": columns.size, "num_warps": columns.num_warps}
    S_MHVK, D_MHVK = (q.new_empty(m, heads, v, k) for _ in range(2))
    x_2MHVC = q.new_empty(2, m, heads, v, CHUNK)
    dv_THV = torch.empty_like(x.v_THV, memory_format=torch.contiguous_format)
    dv_rest_MHVC = q.new_empty(m, heads, v, CHUNK)
    d_before = q.new_empty(n, heads, k, v, **wide)
    _states[grid](
        *(tiles.w_MHCK, tiles.k_out_MHCK, tiles.solve_MHCC, tiles.keep_MHK, x.v_THV),
        *table.of_pieces,
        d_before if state_NHKV is None else state_NHKV,
        *(S_MHVK, x_2MHVC),
        *(x.v_THV.stride(0), m * heads),
        HAS_STATE=state_NHKV is not None,
        **settings,
    )
    _reverse[grid](
        *(*tiles, do_THV, *table.of_pieces),
        d_before if d_after_NHKV is None else d_after_NHKV,
        *(d_before, D_MHVK, dv_THV, dv_rest_MHVC),
        HAS_GRADIENT=d_after_NHKV is not None,
        **settings,
    )
    chunks = Chunks(S_MHVK, D_MHVK, x_2MHVC, dv_rest_MHVC, tiles.keep_MHK)
    q, k, z, b, A_log, dt_bias = gradients(x, table, chunks, factors, do_THV, dv_THV)
    return KDAGradients(q, k, dv_THV, z, b, A_log, dt_bias, d_before)


@triton.jit
def _states(
    w_p,
    k_out_p,
    solve_p,
    keep_p,
    v_p,
    start_p,
    chunk_p,
    piece_p,
    before_p,
    S_p,
    x_p,
    v_stride,
    num_tiles,
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
    row_C, k_, t_C = tl.arange(0, C), tl.arange(0, K), token_order(C)
    v_ = (tl.program_id(0) % (V // BV)) * BV + tl.arange(0, BV)
    S_VK = tl.zeros([BV, K], tl.float32)
    if HAS_STATE:
        state_at = nh.to(tl.int64) * K * V + k_[None, :] * V + v_[:, None]
        S_VK += tl.load(before_p + state_at).to(tl.float32)
    for p in range(tl.load(piece_p + n), tl.load(piece_p + n + 1)):
        start, end = tl.load(start_p + p), tl.load(start_p + p + 1)
        first = tl.load(chunk_p + p)
        for i in tl.range(0, tl.cdiv(end - start, C), num_stages=3):
            tile = ((first + i) * H + h) * C
            token_C = start + i * C + t_C
            v_at = token_C[:, None] * v_stride + (h * V + v_)[None, :]
            v_CV = tl.load(v_p + v_at, mask=(token_C < end)[:, None], other=0.0).to(DTYPE)
            solve_CC = tl.load(solve_p + tile * C + row_C[:, None] + row_C[None, :] * C)
            w_KC = tl.load(w_p + tile * K + (k_[:, None] + row_C[None, :] * K))
            k_out_CK = tl.load(k_out_p + tile * K + (row_C[:, None] * K + k_[None, :]))
            keep_K = tl.load(keep_p + ((first + i) * H + h) * K + k_)
            S = S_VK.to(DTYPE)
            at_VK = ((first + i) * H + h) * K * V + (v_[:, None] * K + k_[None, :])
            tl.store(S_p + at_VK, S)
            x_VC = tl.dot(tl.trans(v_CV), solve_CC, input_precision=PRECISION)
            x_VC = tl.dot(S, w_KC, x_VC, input_precision=PRECISION)
            x = x_VC.to(DTYPE)
            x_at = x_p + tile * V + (v_[:, None] * C + row_C[None, :])
            tl.store(x_at, x)
            tl.store(x_at + num_tiles.to(tl.int64) * C * V, rest_of(x_VC, x))
            S_VK = tl.dot(x, k_out_CK, S_VK * keep_K[None, :], input_precision=PRECISION)


@triton.jit
def _reverse(
    q_in_p,
    w_p,
    k_out_p,
    attn_p,
    solve_p,
    keep_p,
    do_p,
    start_p,
    chunk_p,
    piece_p,
    d_after_p,
    d_before_p,
    D_p,
    dv_p,
    dv_rest_p,
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
    row_C, k_, t_C = tl.arange(0, C), tl.arange(0, K), token_order(C)
    v_ = (tl.program_id(0) % (V // BV)) * BV + tl.arange(0, BV)
    state_at = nh.to(tl.int64) * K * V + k_[None, :] * V + v_[:, None]
    D_VK = tl.zeros([BV, K], tl.float32)
    if HAS_GRADIENT:
        D_VK += tl.load(d_after_p + state_at).to(tl.float32)
    end_piece = tl.load(piece_p + n + 1)
    for back in range(end_piece - tl.load(piece_p + n)):
        p = end_piece - 1 - back
        start, end = tl.load(start_p + p), tl.load(start_p + p + 1)
        first = tl.load(chunk_p + p)
        num_chunks = tl.cdiv(end - start, C)
        for later in tl.range(0, num_chunks, num_stages=3):
            i = num_chunks - 1 - later
            tile = ((first + i) * H + h) * C
            at_CK = tile * K + (row_C[:, None] * K + k_[None, :])
            at_CC = tile * C + (row_C[:, None] * C + row_C[None, :])
            token_C = start + i * C + t_C
            here_1C = (token_C < end)[None, :]
            v_at = token_C[None, :] * (H * V) + (h * V + v_)[:, None]
            do_VC = tl.load(do_p + v_at, mask=here_1C, other=0.0).to(DTYPE)
            attn_CC, solve_CC = tl.load(attn_p + at_CC), tl.load(solve_p + at_CC)
            q_in_CK, w_CK = tl.load(q_in_p + at_CK), tl.load(w_p + at_CK)
            k_out_KC = tl.load(k_out_p + tile * K + (k_[:, None] + row_C[None, :] * K))
            keep_K = tl.load(keep_p + ((first + i) * H + h) * K + k_)

            D = D_VK.to(DTYPE)
            at_VK = ((first + i) * H + h) * K * V + (v_[:, None] * K + k_[None, :])
            tl.store(D_p + at_VK, D)
            dx_VC = tl.dot(do_VC, attn_CC, input_precision=PRECISION)
            dx_VC = tl.dot(D, k_out_KC, dx_VC, input_precision=PRECISION)
            dx = dx_VC.to(DTYPE)
            D_VK = tl.dot(do_VC, q_in_CK, D_VK * keep_K[None, :], input_precision=PRECISION)
            D_VK = tl.dot(dx, w_CK, D_VK, input_precision=PRECISION)
            dv_VC = tl.dot(rest_of(dx_VC, dx), solve_CC, input_precision=PRECISION)
            dv_VC = tl.dot(dx, solve_CC, dv_VC, input_precision=PRECISION)
            dv = dv_VC.to(dv_p.dtype.element_ty)
            tl.store(tl.trans(dv_p + v_at), tl.trans(dv), mask=(token_C < end)[:, None])
            rest_at = dv_rest_p + tile * V + (v_[:, None] * C + row_C[None, :])
            tl.store(rest_at, rest_of(dv_VC, dv).to(DTYPE))
    tl.store(d_before_p + state_at, D_VK)
