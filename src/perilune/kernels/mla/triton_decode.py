"""Absorbed decoding on a GPU: launches of the wide and the narrow programs, and of the merge.

Legend: N sequences, Q query tokens of each, H heads, C latent width, R shared key channels, P pages
of S rows, W pages a sequence may have.

Programs of both kinds run beside each other, the narrow ones on a stream of their own, which joins
before the merge.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from perilune.kernels.common.triton_math import LOG2_E, dot_precision, uses_ptx
from perilune.kernels.mla.triton_decode_merge import merge
from perilune.kernels.mla.triton_decode_narrow import narrow_part
from perilune.kernels.mla.triton_decode_plan import Plan, num_programs, plan_of
from perilune.kernels.mla.triton_decode_share import (
    num_tiles,
    place_of,
    tiles_of,
    write_begins,
)
from perilune.kernels.mla.triton_decode_wide import wide_part

MANY_ROWS = 512
"""From here on a merging program takes a whole row."""


Launches = tuple[Callable[..., None], Callable[..., None]]
"""Of the wide and the narrow programs."""


class Rows(NamedTuple):
    """What is cached, and where."""

    c_PSC: Tensor
    r_PSR: Tensor
    rate_PS: Tensor | None
    """What each row of `c_PSC` was divided by, where that is fp8."""
    table_NW: Tensor
    length_N: Tensor

    @property
    def page(self) -> int:
        """As the kernels take it: 0 where a sequence has one page."""
        return 0 if self.table_NW.shape[1] == 1 else self.c_PSC.shape[1]

    @property
    def capacity(self) -> int:
        return self.table_NW.shape[1] * self.c_PSC.shape[1]

    def tile_by_tile(self, tokens: int) -> bool:
        """Whether the copy engine can fetch tiles of so many tokens: none crosses a page, pages
        follow each other like rows do, and rows are aligned."""
        x = (self.c_PSC, self.r_PSR)
        rows_on = all(len(y) == 1 or y.stride(0) == y.shape[1] * y.stride(1) for y in x)
        aligned = all(y.data_ptr() % 16 == 0 and y.stride(1) * y.itemsize % 16 == 0 for y in x)
        return self.rate_PS is None and self.page % tokens == 0 and rows_on and aligned

    def descriptors(self, tokens: int) -> tuple[TensorDescriptor, ...]:
        """Of pools as one array of rows each."""
        return tuple(
            TensorDescriptor(
                x,
                [x.shape[0] * x.shape[1], x.shape[2]],
                [x.stride(1), 1],
                [tokens, _block(x.shape[2])],
            )
            for x in (self.c_PSC, self.r_PSR)
        )


def attend(
    q_NQHC: Tensor,
    rows: Rows,
    scale: float,
    plan: Plan | None = None,
    tma: bool | None = None,
    launches: Launches | None = None,
) -> Tensor:
    """The mixed latents [N, Q, H, C]. By default `plan`, `tma` and `launches` are what serves
    best."""
    n, q, h, _ = q_NQHC.shape
    c, device = rows.c_PSC.shape[2], q_NQHC.device
    if plan is None:
        plan = plan_of(q * h, q_NQHC.dtype, num_programs(device), rows.rate_PS is None)
    if tma is None:
        tma = device.type == "cuda" and not plan.in_chunks and rows.tile_by_tile(plan.tokens)
    descriptors = rows.descriptors(plan.tokens) if tma else (None, None)
    fp32: dict[str, Any] = {"dtype": torch.float32}
    wide_slots = (plan.teams + n) * plan.wide_members * plan.wide_rows
    narrow_slots = (plan.teams + n) * plan.narrow_members * plan.narrow_rows
    partial = q_NQHC.new_empty((wide_slots + narrow_slots) * c, **fp32)
    lse = q_NQHC.new_empty(wide_slots + narrow_slots, **fp32)
    begin = q_NQHC.new_empty(n + 1, dtype=torch.int32)
    o_NQHC = q_NQHC.new_empty(n, q, h, c)
    parts = (descriptors, begin, partial, lse)
    launch_wide, launch_narrow = launches or (_launch_wide, _launch_narrow)
    if plan.wide_rows and plan.narrow_rows and device.type == "cuda":
        side, main = _side_stream(device), torch.cuda.current_stream(device)
        side.wait_stream(main)
        launch_wide(q_NQHC, rows, parts, scale, plan)
        with torch.cuda.stream(side):
            launch_narrow(q_NQHC, rows, parts, scale, plan, wide_slots)
        main.wait_stream(side)
    else:
        if plan.wide_rows:
            launch_wide(q_NQHC, rows, parts, scale, plan)
        if plan.narrow_rows:
            launch_narrow(q_NQHC, rows, parts, scale, plan, wide_slots)
    many = n * q * h >= MANY_ROWS
    channels = triton.next_power_of_2(c) if many else min(64, triton.next_power_of_2(c))
    merge[(n * q * h * triton.cdiv(c, channels),)](
        partial,
        lse,
        begin,
        o_NQHC,
        n,
        plan.teams,
        wide_slots * c,
        wide_slots,
        plan.wide_members,
        plan.narrow_members,
        ROWS=q * h,
        WIDE_ROWS=plan.wide_rows,
        C=c,
        BC=channels,
        BP=4 if many else 32,
        PTX=uses_ptx(device),
        num_warps=4,
    )
    return o_NQHC


def _launch_wide(q_NQHC: Tensor, rows: Rows, parts: Any, scale: float, plan: Plan) -> None:
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


def _launch_narrow(
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
    rate_PS = lse[None] if rows.rate_PS is None else rows.rate_PS
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
        *rate_PS.stride()[:2],
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
        "BC": _block(c),
        "BR": _block(r),
        "PRECISION": dot_precision(q_NQHC.dtype),
        "PTX": uses_ptx(q_NQHC.device),
    }


@cache
def _side_stream(device: torch.device) -> torch.cuda.Stream:
    """Of another priority: it is none of the pool that a graph is captured on."""
    return torch.cuda.Stream(device, priority=-1)


def _block(channels: int) -> int:
    return max(16, triton.next_power_of_2(channels))


@triton.jit(
    do_not_specialize=["sequences", "capacity", "teams", "partial_from", "lse_from", "members"]
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
