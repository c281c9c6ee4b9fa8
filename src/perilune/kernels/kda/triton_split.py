"""Few heads of a long sequence, spread over the card.

Legend: P pieces of all sequences, N sequences, H heads, K key width, V value width, C tokens of a
chunk.

A piece of a sequence maps the state that comes in to the state that goes out by S' = A S + b.
`_summarise` finds A and b of every piece at once (the chain from the unit matrix without values,
and from zero with them), `_carry` runs the states through the pieces, and then the chain itself
runs on all pieces at once. That is thrice the work of one chain, in a fraction of its steps.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from perilune.kernels.common.packing import Packing
from perilune.kernels.common.triton_math import dot_precision
from perilune.kernels.kda.triton_chunk import token_order
from perilune.kernels.kda.triton_forward import KDAInputs, Tiles, chain, meta
from perilune.kernels.kda.triton_table import CHUNK, ChunkTable

PROGRAMS = 256
"""Of one step of two blocks a chain: about two for each multiprocessor of a large card."""
FEWEST = 4
"""Pieces: with fewer, the steps that are saved are those that the summaries take."""
SHORTEST = 16 * CHUNK
"""Shorter pieces cost more in `_carry` than they save."""
BLOCK = 64


def segment_length(packing: Packing, heads: int, v: int) -> int | None:
    """Tokens of a piece; None where there are chains enough, or nothing is long enough to cut."""
    chains = packing.num_sequences * heads * max(1, v // BLOCK)
    wanted = PROGRAMS // (2 * chains)
    longest = max(packing.lengths)
    if wanted < FEWEST or longest < 2 * SHORTEST or packing.segment_BL is not None:
        return None
    chunks = -(-longest // (CHUNK * wanted))
    return max(SHORTEST, chunks * CHUNK)


def split_chain(
    x: KDAInputs,
    tiles: Tiles,
    table: ChunkTable,
    state_NHKV: Tensor | None,
    *,
    block: int | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """(outputs [T, H, V], fp32 states after each sequence, the same after each piece)."""
    heads, k, v = x.sizes
    p, n = table.num_pieces, table.num_sequences
    wide = {"dtype": torch.float32}
    A_PHKK, b_PHVK = (x.q_THK.new_empty(p, heads, width, k, **wide) for width in (k, v))
    before_PHKV = x.q_THK.new_empty(p, heads, k, v, **wide)
    after_NHKV = x.q_THK.new_empty(n, heads, k, v, **wide)
    columns = min(BLOCK, k, v)
    _summarise[(p * heads * ((k + v) // columns),)](
        *(tiles.w_MHCK, tiles.k_out_MHCK, tiles.solve_MHCC, tiles.keep_MHK, x.v_THV),
        *(table.start_P1, table.chunk_P1, A_PHKK, b_PHVK, x.v_THV.stride(0)),
        **meta(x),
        BLOCK=columns,
        num_warps=4,
    )
    _carry[(n * heads * (v // min(v, 32)),)](
        *(A_PHKK, b_PHVK, table.piece_N1),
        after_NHKV if state_NHKV is None else state_NHKV,
        *(before_PHKV, after_NHKV),
        H=heads,
        K=k,
        V=v,
        BV=min(v, 32),
        PRECISION=dot_precision(torch.float32),
        HAS_STATE=state_NHKV is not None,
        num_warps=4,
    )
    o_THV, after_PHKV = chain(x, tiles, table.of_single_pieces, before_PHKV, block=block)
    return o_THV, after_NHKV, after_PHKV


@triton.jit
def _summarise(
    w_p,
    k_out_p,
    solve_p,
    keep_p,
    v_p,
    start_p,
    chunk_p,
    A_p,
    b_p,
    v_stride,
    H: tl.constexpr,
    K: tl.constexpr,
    V: tl.constexpr,
    C: tl.constexpr,
    PRECISION: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """A is stored by its columns, b transposed: both [column, K]."""
    COLUMNS: tl.constexpr = (K + V) // BLOCK
    ph = tl.program_id(0) // COLUMNS
    p, h = ph // H, ph % H
    column = (tl.program_id(0) % COLUMNS) * BLOCK
    is_A = column < K
    DTYPE: tl.constexpr = w_p.dtype.element_ty
    row_C, k_, t_C = tl.arange(0, C), tl.arange(0, K), token_order(C)
    column_ = column + tl.arange(0, BLOCK)
    v_ = column_ - K
    S_VK = tl.where(column_[:, None] == k_[None, :], 1.0, 0.0)
    start, end = tl.load(start_p + p), tl.load(start_p + p + 1)
    first = tl.load(chunk_p + p)
    for i in tl.range(0, tl.cdiv(end - start, C), num_stages=3):
        tile = ((first + i) * H + h) * C
        token_C = start + i * C + t_C
        v_at = token_C[:, None] * v_stride + (h * V + v_)[None, :]
        valued_CV = (token_C < end)[:, None] & (v_ >= 0)[None, :]
        v_CV = tl.load(v_p + v_at, mask=valued_CV, other=0.0).to(DTYPE)
        solve_CC = tl.load(solve_p + tile * C + row_C[:, None] + row_C[None, :] * C)
        w_KC = tl.load(w_p + tile * K + (k_[:, None] + row_C[None, :] * K))
        k_out_CK = tl.load(k_out_p + tile * K + (row_C[:, None] * K + k_[None, :]))
        keep_K = tl.load(keep_p + ((first + i) * H + h) * K + k_)
        x_VC = tl.dot(tl.trans(v_CV), solve_CC, input_precision=PRECISION)
        x_VC = tl.dot(S_VK.to(DTYPE), w_KC, x_VC, input_precision=PRECISION).to(DTYPE)
        S_VK = tl.dot(x_VC, k_out_CK, S_VK * keep_K[None, :], input_precision=PRECISION)
    if is_A:
        tl.store(A_p + ph.to(tl.int64) * K * K + column_[:, None] * K + k_[None, :], S_VK)
    else:
        tl.store(b_p + ph.to(tl.int64) * V * K + v_[:, None] * K + k_[None, :], S_VK)


@triton.jit
def _carry(
    A_p,
    b_p,
    piece_p,
    state_p,
    before_p,
    after_p,
    H: tl.constexpr,
    K: tl.constexpr,
    V: tl.constexpr,
    BV: tl.constexpr,
    PRECISION: tl.constexpr,
    HAS_STATE: tl.constexpr,
):
    nh = (tl.program_id(0) // (V // BV)).to(tl.int64)
    n, h = nh // H, nh % H
    k_, v_ = tl.arange(0, K), (tl.program_id(0) % (V // BV)) * BV + tl.arange(0, BV)
    state_at = k_[None, :] * V + v_[:, None]
    S_VK = tl.zeros([BV, K], tl.float32)
    if HAS_STATE:
        S_VK += tl.load(state_p + nh * K * V + state_at).to(tl.float32)
    for p in range(tl.load(piece_p + n), tl.load(piece_p + n + 1)):
        ph = p * H + h
        tl.store(before_p + ph * K * V + state_at, S_VK)
        A_KK = tl.load(A_p + ph * K * K + k_[:, None] * K + k_[None, :])
        b_VK = tl.load(b_p + ph * V * K + v_[:, None] * K + k_[None, :])
        S_VK = tl.dot(S_VK, A_KK, b_VK, input_precision=PRECISION)
    tl.store(after_p + nh * K * V + state_at, S_VK)
