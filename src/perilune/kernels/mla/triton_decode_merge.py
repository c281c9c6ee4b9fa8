"""The parts of a sequence, weighed by their sums: exact whatever the parts are.

Legend: N sequences, P parts, C latent width.
"""

from __future__ import annotations

import triton
import triton.language as tl

from perilune.kernels.common.triton_math import exp2
from perilune.kernels.mla.triton_decode_tile import LOWEST


@triton.jit(do_not_specialize=["sequences", "teams"])
def merge(
    partial_p,
    lse_p,
    begin_p,
    o_p,
    sequences,
    teams,
    ROWS: tl.constexpr,
    C: tl.constexpr,
    BC: tl.constexpr,
    BP: tl.constexpr,
    PTX: tl.constexpr,
):
    """One row of one sequence, BC channels of it, BP parts at a time."""
    BLOCKS: tl.constexpr = (C + BC - 1) // BC
    block = tl.program_id(0) % BLOCKS
    row = tl.program_id(0) // BLOCKS % ROWS
    n = (tl.program_id(0) // (BLOCKS * ROWS)).to(tl.int64)
    begin, end = tl.load(begin_p + n), tl.load(begin_p + n + 1)
    quota = tl.maximum((tl.load(begin_p + sequences) + teams - 1) // teams, 1)
    first_team = begin // quota
    number = tl.where(end > begin, (end - 1) // quota + 1 - first_team, 0)
    first = (first_team + n) * ROWS + row
    c_, p_ = block * BC + tl.arange(0, BC), tl.arange(0, BP)
    highest = tl.full([], LOWEST, tl.float32)
    total = tl.full([], 0.0, tl.float32)
    o_C = tl.zeros([BC], tl.float32)
    for p in range(0, number, BP):
        at_P = first + (p + p_).to(tl.int64) * ROWS
        here_P = p + p_ < number
        lse_P = tl.load(lse_p + at_P, mask=here_P, other=float("-inf"))
        here_PC = here_P[:, None] & (c_ < C)[None, :]
        o_PC = tl.load(partial_p + at_P[:, None] * C + c_[None, :], mask=here_PC, other=0.0)
        top = tl.maximum(highest, tl.max(lse_P, axis=0))
        weight_P = exp2(lse_P - top, PTX)
        faded = exp2(highest - top, PTX)
        # A part of no weight may never have been written.
        o_PC = tl.where((weight_P > 0)[:, None], o_PC * weight_P[:, None], 0.0)
        o_C = o_C * faded + tl.sum(o_PC, axis=0)
        total = total * faded + tl.sum(weight_P, axis=0)
        highest = top
    o_C *= tl.where(total > 0, 1.0 / total, 0.0)
    at_C = (n * ROWS + row) * C + c_
    tl.store(o_p + at_C, o_C.to(o_p.dtype.element_ty), mask=c_ < C)
