"""Programs of MLA decode in plain Triton, for any widths: each has a team's tokens for one tile of
query rows.

Legend: N sequences, Q query tokens of each, H heads, C latent width, R shared key channels, P pages
of S rows, W pages a sequence may have.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from perilune.kernels.common.triton_math import LOG2_E, dot_precision, uses_ptx
from perilune.kernels.mla.triton_decode_part import part
from perilune.kernels.mla.triton_decode_plan import Parts, Plan
from perilune.kernels.mla.triton_decode_rows import Rows
from perilune.kernels.mla.triton_decode_share import num_tiles, place_of, tiles_of, write_begins

LEAST_CHANNELS = 16
"""Of a tile: what a product takes."""


def launch(q_NQHC: Tensor, rows: Rows, parts: Parts, scale: float, plan: Plan) -> None:
    c, r = rows.c_PSC.shape[2], rows.r_PSR.shape[2]
    rate_PS = parts.lse if rows.rate_PS is None else rows.rate_PS
    _attend[(plan.programs,)](
        q_NQHC,
        rows.c_PSC,
        rows.r_PSR,
        rate_PS,
        rows.table_NW,
        rows.length_N,
        *parts,
        q_NQHC.shape[0],
        rows.capacity,
        plan.teams,
        *q_NQHC.stride()[:3],
        rows.c_PSC.stride(0),
        rows.r_PSR.stride(0),
        *((0, 1) if rows.rate_PS is None else rate_PS.stride()),
        rows.table_NW.stride(0),
        scale * LOG2_E.value,
        ROWS=plan.rows,
        Q=q_NQHC.shape[1],
        H=q_NQHC.shape[2],
        C=c,
        R=r,
        C_STRIDE=rows.c_PSC.stride(1),
        R_STRIDE=rows.r_PSR.stride(1),
        PAGE=rows.page,
        BS=plan.block,
        BN=plan.tokens,
        BC=max(LEAST_CHANNELS, triton.next_power_of_2(c)),
        BR=max(LEAST_CHANNELS, triton.next_power_of_2(r)),
        PRECISION=dot_precision(q_NQHC.dtype),
        PTX=uses_ptx(q_NQHC.device),
        IN_CHUNKS=plan.in_chunks,
        num_warps=8,
    )


@triton.jit(do_not_specialize=["sequences", "capacity", "teams", "table_stride"])
def _attend(
    q_p,
    c_p,
    r_p,
    rate_p,
    table_p,
    length_p,
    begin_p,
    partial_p,
    lse_p,
    sequences,
    capacity,
    teams,
    q_n_stride,
    q_q_stride,
    q_h_stride,
    c_page_stride,
    r_page_stride,
    rate_page_stride,
    rate_stride,
    table_stride,
    scale,
    ROWS: tl.constexpr,
    Q: tl.constexpr,
    H: tl.constexpr,
    C: tl.constexpr,
    R: tl.constexpr,
    C_STRIDE: tl.constexpr,
    R_STRIDE: tl.constexpr,
    PAGE: tl.constexpr,
    BS: tl.constexpr,
    BN: tl.constexpr,
    BC: tl.constexpr,
    BR: tl.constexpr,
    PRECISION: tl.constexpr,
    PTX: tl.constexpr,
    IN_CHUNKS: tl.constexpr,
):
    """One team's share of the context, for one of the tiles of ROWS query rows."""
    TILES: tl.constexpr = (ROWS + BS - 1) // BS
    # A team's programs are neighbours: its latents come from memory once.
    row = tl.program_id(0) % TILES * BS
    team = tl.program_id(0) // TILES
    write_begins(begin_p, length_p, sequences, capacity, BN)
    total = num_tiles(length_p, sequences, capacity, BN)
    quota = (total + teams - 1) // teams
    at = tl.minimum(team * quota, total)
    last = tl.minimum(at + quota, total)
    n, begin = place_of(at, length_p, sequences, capacity, BN)
    while at < last:
        length = tl.load(length_p + n)
        end = tl.minimum(length, capacity)
        stop = tl.minimum(begin + tiles_of(end, BN), last)
        if stop > at:
            slot = (team + n).to(tl.int64)
            part(
                q_p + n.to(tl.int64) * q_n_stride,
                c_p,
                r_p,
                rate_p,
                table_p + n.to(tl.int64) * table_stride,
                partial_p + slot * (ROWS * C),
                lse_p + slot * ROWS,
                at - begin,
                stop - begin,
                length,
                end,
                row,
                q_q_stride,
                q_h_stride,
                c_page_stride,
                r_page_stride,
                rate_page_stride,
                rate_stride,
                scale,
                ROWS=ROWS,
                Q=Q,
                H=H,
                C=C,
                R=R,
                C_STRIDE=C_STRIDE,
                R_STRIDE=R_STRIDE,
                PAGE=PAGE,
                BS=BS,
                BN=BN,
                BC=BC,
                BR=BR,
                PRECISION=PRECISION,
                PTX=PTX,
                IN_CHUNKS=IN_CHUNKS,
            )
        at = stop
        begin += tiles_of(end, BN)
        n += 1
