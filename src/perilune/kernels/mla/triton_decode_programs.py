"""Programs of MLA decode in Triton: each is one member of a team, for one tile of query rows.

Legend: N sequences, Q query tokens of each, H heads, C latent width, R shared key channels, P pages
of S rows, W pages a sequence may have.
"""

from __future__ import annotations

from typing import Any

import triton
import triton.language as tl
from torch import Tensor

from perilune.kernels.common.triton_math import LOG2_E, dot_precision, uses_ptx
from perilune.kernels.mla.triton_decode_narrow import narrow_part
from perilune.kernels.mla.triton_decode_plan import Plan
from perilune.kernels.mla.triton_decode_rows import Rows, block_of
from perilune.kernels.mla.triton_decode_share import (
    num_tiles,
    place_of,
    tiles_of,
    write_begins,
)
from perilune.kernels.mla.triton_decode_wide import wide_part


def launch_wide(q_NQHC: Tensor, rows: Rows, parts: Any, scale: float, plan: Plan) -> None:
    _attend[(plan.wide_programs,)](
        *_operands(q_NQHC, rows, parts, scale, plan),
        0,
        0,
        plan.wide_members,
        **_sizes(q_NQHC, rows, parts[0]),
        FIRST_ROW=0,
        ROWS=plan.wide_rows,
        BS=plan.wide_block,
        BN=plan.tokens,
        NARROW=False,
        WRITES_BEGINS=True,
        IN_CHUNKS=plan.in_chunks,
        num_warps=8,
    )


def launch_narrow(
    q_NQHC: Tensor, rows: Rows, parts: Any, scale: float, plan: Plan, wide_slots: int
) -> None:
    c = rows.c_PSC.shape[2]
    _attend[(plan.narrow_programs,)](
        *_operands(q_NQHC, rows, parts, scale, plan),
        wide_slots * c,
        wide_slots,
        plan.narrow_members,
        **_sizes(q_NQHC, rows, parts[0]),
        FIRST_ROW=plan.wide_rows,
        ROWS=plan.narrow_rows,
        BS=plan.narrow_block,
        BN=plan.tokens,
        NARROW=True,
        WRITES_BEGINS=plan.wide_rows == 0,
        IN_CHUNKS=False,
        num_warps=4,
    )


def _operands(q_NQHC: Tensor, rows: Rows, parts: Any, scale: float, plan: Plan) -> tuple[Any, ...]:
    descriptors, begin, partial, lse = parts
    rate_PS = lse if rows.rate_PS is None else rows.rate_PS
    return (
        q_NQHC,
        rows.c_PSC,
        rows.r_PSR,
        *descriptors,
        rate_PS,
        rows.table_NW,
        rows.length_N,
        begin,
        partial,
        lse,
        q_NQHC.shape[0],
        rows.capacity,
        plan.teams,
        *q_NQHC.stride()[:3],
        rows.c_PSC.stride(0),
        rows.r_PSR.stride(0),
        *((0, 1) if rows.rate_PS is None else rate_PS.stride()),
        rows.table_NW.stride(0),
        scale * LOG2_E.value,
    )


def _sizes(q_NQHC: Tensor, rows: Rows, descriptors: Any) -> dict[str, Any]:
    c, r = rows.c_PSC.shape[2], rows.r_PSR.shape[2]
    return {
        "TMA": descriptors[0] is not None,
        "Q": q_NQHC.shape[1],
        "H": q_NQHC.shape[2],
        "C": c,
        "R": r,
        "C_STRIDE": rows.c_PSC.stride(1),
        "R_STRIDE": rows.r_PSR.stride(1),
        "PAGE": rows.page,
        "BC": block_of(c),
        "BR": block_of(r),
        "PRECISION": dot_precision(q_NQHC.dtype),
        "PTX": uses_ptx(q_NQHC.device),
    }


@triton.jit(
    do_not_specialize=[
        "sequences",
        "capacity",
        "teams",
        "partial_from",
        "lse_from",
        "members",
        "table_stride",
    ]
)
def _attend(
    q_p,
    c_p,
    r_p,
    c_d,
    r_d,
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
    partial_from,
    lse_from,
    members,
    FIRST_ROW: tl.constexpr,
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
    NARROW: tl.constexpr,
    WRITES_BEGINS: tl.constexpr,
    PRECISION: tl.constexpr,
    PTX: tl.constexpr,
    IN_CHUNKS: tl.constexpr,
    TMA: tl.constexpr,
):
    """One member of a team, for one tile of the rows FIRST_ROW to FIRST_ROW + ROWS - 1."""
    TILES: tl.constexpr = (ROWS + BS - 1) // BS
    # The tiles of rows of one member are neighbours: its latents come from memory once.
    row = tl.program_id(0) % TILES * BS
    member = tl.program_id(0) // TILES % members
    team = tl.program_id(0) // (TILES * members)
    if WRITES_BEGINS:
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
            slot = ((team + n) * members + member).to(tl.int64)
            if NARROW:
                narrow_part(
                    q_p + n.to(tl.int64) * q_n_stride,
                    c_p,
                    r_p,
                    c_d,
                    r_d,
                    rate_p,
                    table_p + n.to(tl.int64) * table_stride,
                    partial_p + partial_from + slot * (ROWS * C),
                    lse_p + lse_from + slot * ROWS,
                    at - begin + member,
                    stop - begin,
                    length,
                    end,
                    members,
                    row,
                    q_q_stride,
                    q_h_stride,
                    c_page_stride,
                    r_page_stride,
                    rate_page_stride,
                    rate_stride,
                    scale,
                    FIRST_ROW=FIRST_ROW,
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
                    TMA=TMA,
                )
            else:
                wide_part(
                    q_p + n.to(tl.int64) * q_n_stride,
                    c_p,
                    r_p,
                    c_d,
                    r_d,
                    rate_p,
                    table_p + n.to(tl.int64) * table_stride,
                    partial_p + partial_from + slot * (ROWS * C),
                    lse_p + lse_from + slot * ROWS,
                    at - begin + member,
                    stop - begin,
                    length,
                    end,
                    members,
                    row,
                    q_q_stride,
                    q_h_stride,
                    c_page_stride,
                    r_page_stride,
                    rate_page_stride,
                    rate_stride,
                    scale,
                    FIRST_ROW=FIRST_ROW,
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
                    TMA=TMA,
                    IN_CHUNKS=IN_CHUNKS,
                )
        at = stop
        begin += tiles_of(end, BN)
        n += 1
