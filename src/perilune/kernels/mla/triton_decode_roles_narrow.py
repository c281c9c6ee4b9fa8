"""Narrow parts for K3's 512 + 64 channels in Gluon.

Legend: S 16 or 32 query rows of a tile, N 64 tokens of a tile, C channels.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from perilune.kernels.common.triton_math import LOG2_E
from perilune.kernels.mla import triton_decode_roles
from perilune.kernels.mla.triton_decode_plan import Plan
from perilune.kernels.mla.triton_decode_roles import (
    BLOCK,
    BOXES,
    LOWEST,
    barriers_of,
    clear_behind,
    exp2,
    fetch,
    filled_before,
    page_of,
    place_of_box,
    share_of,
    tiles_of,
)

RING = gl.constexpr(22)
"""What memory has beside the queries."""


@gluon.jit
def _score(
    operands,
    FIRST_ROW: gl.constexpr,
    ROWS: gl.constexpr,
    BS: gl.constexpr,
    Q: gl.constexpr,
    H: gl.constexpr,
    PAGE: gl.constexpr,
):
    table_p, lse_p, shared, barriers, share, table_stride, scale = operands
    q_s, c_s, p_s, faded_s, inverse_s = shared
    full, empty, q_full, q_empty, p_full, p_empty, scored, finished, settled = barriers
    length_p, at, last, n, begin, capacity, team, member, members, row = share
    mma: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BS, 16])
    of_rows: gl.constexpr = gl.SliceLayout(0, mma)
    row_S = row + gl.arange(0, BS, of_rows)
    n_ = gl.arange(0, BLOCK, gl.SliceLayout(1, mma))
    k, segment = 0, 0
    while at < last:
        length = gl.load(length_p + n)
        end = gl.minimum(length, capacity)
        tiles = tiles_of(end)
        stop = gl.minimum(begin + tiles, last)
        first, behind = at - begin + member, stop - begin
        highest_S = gl.full([BS], LOWEST, gl.float32, of_rows)
        # Summed over tokens at the end: their axis is shared out among warps.
        total_NS = gl.full([BLOCK, BS], 0.0, gl.float32, mma)
        if first < behind:
            table_n = table_p + n.to(gl.int64) * table_stride
            limit_S = length - (Q - 1) + (FIRST_ROW + row_S) // H
            page = page_of(table_n, first, behind, PAGE)
            mbarrier.wait(q_full, segment & 1)
            for tile in range(first, behind, members):
                here = gl.where(page >= 0, end, 0)
                page = page_of(table_n, tile + members, behind, PAGE)
                s_NS = gl.full([BLOCK, BS], 0.0, gl.float32, mma)
                for b in gl.static_range(BOXES):
                    place = place_of_box(k, b, RING)
                    mbarrier.wait(full.index(place), filled_before(k, b, RING) & 1)
                    q_CS = q_s.index(b).permute((1, 0))
                    s_NS = warpgroup_mma(c_s.index(place), q_CS, s_NS, use_acc=b > 0, is_async=True)
                s_NS = warpgroup_mma_wait(0, deps=[s_NS])
                mbarrier.arrive(empty.index(place_of_box(k, 0, RING)))
                mbarrier.arrive(scored)
                token_N = tile * BLOCK + n_
                seen_NS = token_N[:, None] < gl.minimum(limit_S, here)[None, :]
                s_NS = gl.where(seen_NS, s_NS * scale, float("-inf"))
                top_S = gl.maximum(highest_S, gl.max(s_NS, axis=0))
                s_NS = exp2(s_NS - top_S[None, :])
                faded_S = exp2(highest_S - top_S)
                total_NS = total_NS * faded_S[None, :] + s_NS
                highest_S = top_S
                if end < (tile + 1) * BLOCK:
                    clear_behind(c_s, k, end - tile * BLOCK, RING)
                mbarrier.wait(p_empty.index(k & 1), ((k >> 1) & 1) ^ 1)
                p_s.index(k & 1).store(s_NS.to(gl.bfloat16))
                fence_async_shared()
                faded_s.index(k & 1).store(faded_S)
                mbarrier.arrive(p_full.index(k & 1))
                k += 1
            mbarrier.arrive(q_empty)
            mbarrier.wait(settled, (segment & 1) ^ 1)
            total_S = gl.sum(total_NS, axis=0)
            inverse_s.store(gl.where(total_S > 0, 1.0 / total_S, 0.0))
            mbarrier.arrive(finished)
            segment += 1
        if stop > at:
            slot_p = lse_p + ((team + n) * members + member).to(gl.int64) * ROWS
            total_S = gl.sum(total_NS, axis=0)
            gl.store(slot_p + row_S, highest_S + gl.log2(total_S), mask=row_S < ROWS)
        at = stop
        begin += tiles
        n += 1


@gluon.jit
def _mix(
    partial_p, shared, barriers, share, ROWS: gl.constexpr, BS: gl.constexpr, HALF: gl.constexpr
):
    _, c_s, p_s, faded_s, inverse_s = shared
    _, empty, _, _, p_full, p_empty, scored, finished, settled = barriers
    length_p, at, last, n, begin, capacity, team, member, members, row = share
    mma: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BS, 16])
    of_rows: gl.constexpr = gl.SliceLayout(0, mma)
    row_S = row + gl.arange(0, BS, of_rows)
    c_ = gl.arange(0, BLOCK, gl.SliceLayout(1, mma))
    k, segment = 0, 0
    while at < last:
        tiles = tiles_of(gl.minimum(gl.load(length_p + n), capacity))
        stop = gl.minimum(begin + tiles, last)
        first, behind = at - begin + member, stop - begin
        if first < behind:
            o0 = gl.full([BLOCK, BS], 0.0, gl.float32, mma)
            o1 = gl.full([BLOCK, BS], 0.0, gl.float32, mma)
            o2 = gl.full([BLOCK, BS], 0.0, gl.float32, mma)
            o3 = gl.full([BLOCK, BS], 0.0, gl.float32, mma)
            for tile in range(first, behind, members):
                place0 = place_of_box(k, 1 + HALF, RING)
                place1 = place_of_box(k, 3 + HALF, RING)
                place2 = place_of_box(k, 5 + HALF, RING)
                place3 = place_of_box(k, 7 + HALF, RING)
                mbarrier.wait(p_full.index(k & 1), (k >> 1) & 1)
                faded_1S = faded_s.index(k & 1).load(of_rows)[None, :]
                o0, o1, o2, o3 = o0 * faded_1S, o1 * faded_1S, o2 * faded_1S, o3 * faded_1S
                if tile + members < behind:
                    mbarrier.wait(scored, (k + 1) & 1)
                p_NS = p_s.index(k & 1)
                o0 = warpgroup_mma(c_s.index(place0).permute((1, 0)), p_NS, o0, is_async=True)
                o1 = warpgroup_mma(c_s.index(place1).permute((1, 0)), p_NS, o1, is_async=True)
                o2 = warpgroup_mma(c_s.index(place2).permute((1, 0)), p_NS, o2, is_async=True)
                o3 = warpgroup_mma(c_s.index(place3).permute((1, 0)), p_NS, o3, is_async=True)
                o0 = warpgroup_mma_wait(3, deps=[o0])
                mbarrier.arrive(empty.index(place0))
                o1 = warpgroup_mma_wait(2, deps=[o1])
                mbarrier.arrive(empty.index(place1))
                o2 = warpgroup_mma_wait(1, deps=[o2])
                mbarrier.arrive(empty.index(place2))
                o3 = warpgroup_mma_wait(0, deps=[o3])
                mbarrier.arrive(empty.index(place3))
                mbarrier.arrive(p_empty.index(k & 1))
                k += 1
            mbarrier.wait(finished, segment & 1)
            inverse_1S = inverse_s.load(of_rows)[None, :]
            mbarrier.arrive(settled)
            slot_p = partial_p + ((team + n) * members + member).to(gl.int64) * (ROWS * 512)
            at_CS = slot_p + row_S[None, :] * 512 + c_[:, None] + HALF * 256
            here_CS = (row_S < ROWS)[None, :] & (c_ < BLOCK)[:, None]
            gl.store(at_CS, o0 * inverse_1S, mask=here_CS)
            gl.store(at_CS + 64, o1 * inverse_1S, mask=here_CS)
            gl.store(at_CS + 128, o2 * inverse_1S, mask=here_CS)
            gl.store(at_CS + 192, o3 * inverse_1S, mask=here_CS)
            segment += 1
        at = stop
        begin += tiles
        n += 1


@gluon.jit(do_not_specialize=["sequences", "capacity", "teams", "members", "ahead", "table_stride"])
def attend_narrow(
    q_d, c_d, table_p, length_p, begin_p, partial_p, lse_p,
    sequences, capacity, teams, members, query_rows, page_rows, table_stride, scale, ahead,
    FIRST_ROW: gl.constexpr, ROWS: gl.constexpr, BS: gl.constexpr, Q: gl.constexpr,
    H: gl.constexpr, PAGE: gl.constexpr, WRITES_BEGINS: gl.constexpr, PACED: gl.constexpr,
):  # fmt: skip
    member = gl.program_id(0) % members
    team = gl.program_id(0) // members
    at, last, n, begin = share_of(
        length_p, begin_p, sequences, capacity, teams, team, WRITES_BEGINS
    )
    boxes: gl.constexpr = gl.NVMMASharedLayout(128, 16, 2)
    shares: gl.constexpr = gl.NVMMASharedLayout(2 * BS, 16, 2)
    plain: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    shared = (
        gl.allocate_shared_memory(gl.bfloat16, [BOXES, BS, BLOCK], boxes),
        gl.allocate_shared_memory(gl.bfloat16, [RING, BLOCK, BLOCK], boxes),
        gl.allocate_shared_memory(gl.bfloat16, [2, BLOCK, BS], shares),
        gl.allocate_shared_memory(gl.float32, [2, BS], plain),
        gl.allocate_shared_memory(gl.float32, [BS], plain),
    )
    bars = barriers_of(RING)
    share = (length_p, at, last, n, begin, capacity, team, member, members, 0)
    rows = (query_rows, page_rows, table_stride)
    pace_p = begin_p + sequences + 1 + team
    pace = (pace_p + teams, pace_p, ahead)
    scored = (table_p, lse_p, shared, bars, share, table_stride, scale)
    fetched = (q_d, c_d, table_p, shared, bars, share, rows, pace)
    gl.warp_specialize(
        [
            (_mix, (partial_p, shared, bars, share, ROWS, BS, 0)),
            (_mix, (partial_p, shared, bars, share, ROWS, BS, 1)),
            (_score, (scored, FIRST_ROW, ROWS, BS, Q, H, PAGE)),
            (fetch, (fetched, FIRST_ROW, BS, RING, PAGE, PACED)),
        ],
        [4, 4, 1],
        [144, 200, 24],
    )


def launch_narrow(
    q_NQHC: Tensor, rows: Any, parts: Any, scale: float, plan: Plan, wide_slots: int
) -> None:
    """As `triton_decode_programs.launch_narrow`, for a pool of rows of 512 + 64 channels."""
    _, begin, partial, lse = parts
    (n, q, h, width), pool = q_NQHC.shape, rows.c_PSC
    boxes = gl.NVMMASharedLayout(128, 16, 2)
    num_rows = pool.shape[0] * pool.shape[1]
    q_NQHC = q_NQHC.contiguous()
    attend_narrow[(plan.narrow_programs,)](
        TensorDescriptor(q_NQHC, [n * q * h, width], [width, 1], [plan.narrow_block, 64], boxes),
        TensorDescriptor(pool, [num_rows, width], [pool.stride(1), 1], [64, 64], boxes),
        rows.table_NW,
        rows.length_N,
        begin,
        partial[wide_slots * pool.shape[2] :],
        lse[wide_slots:],
        n,
        rows.capacity,
        plan.teams,
        plan.narrow_members,
        q * h,
        pool.shape[1],
        rows.table_NW.stride(0),
        scale * LOG2_E.value,
        plan.most_members * triton_decode_roles.AHEAD,
        FIRST_ROW=plan.wide_rows,
        ROWS=plan.narrow_rows,
        BS=plan.narrow_block,
        Q=q,
        H=h,
        PAGE=rows.page,
        WRITES_BEGINS=plan.wide_rows == 0,
        PACED=plan.wide_rows > 0 and triton_decode_roles.AHEAD > 0,
        num_warps=4,
    )
