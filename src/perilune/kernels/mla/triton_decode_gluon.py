"""Wide parts for K3's 512 + 64 channels in Gluon: warp groups with a role each.

Legend: S 64 query rows of a tile, N 64 tokens of a tile, C channels.

One warp fetches boxes of 64 tokens by 64 channels, of which two tiles fit beside the queries. One
warp group has the scores and their softmax; two have half of the outputs each. Scores of tile k + 1
come before outputs of tile k, so that tensor cores have those to do during the softmax, and each
box is fetched anew as soon as the outputs have read it. `wide_part` is the same without roles.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from perilune.kernels.common.triton_math import LOG2_E
from perilune.kernels.mla.triton_decode_plan import Plan

RANK, SHARED = 512, 64
BLOCK = gl.constexpr(64)
BOXES = gl.constexpr(9)
BOX_BYTES = gl.constexpr(64 * 64 * 2)
SEQUENCES = gl.constexpr(256)
LOWEST = gl.constexpr(-3.0e38)


@gluon.jit
def _add(a, b):
    return a + b


@gluon.jit
def _exp2(x):
    return gl.inline_asm_elementwise(
        "ex2.approx.ftz.f32 $0, $1;", "=f,f", [x], dtype=gl.float32, is_pure=True, pack=1
    )


@gluon.constexpr_function
def _first_channel(i: int) -> int:
    """Of the i-th box of a tile: the shared channels, then those of the halves of the outputs in
    turn, as they come free."""
    return 64 * (8 if i == 0 else (i - 1) // 2 + (i - 1) % 2 * 4)


@gluon.jit
def _tiles(rows):
    return (gl.maximum(rows, 0) + BLOCK - 1) // BLOCK


@gluon.jit
def _page(table_p, tile, last, PAGE: gl.constexpr):
    if PAGE == 0:
        return gl.load(table_p)
    else:
        return gl.load(table_p + gl.minimum(tile, last - 1) // (PAGE // BLOCK))


@gluon.jit
def _fetch(
    q_d, c_d, table_p, shared, barriers, share, query_rows, page_rows, table_stride,
    PAGE: gl.constexpr,
):  # fmt: skip
    q_s, c_s, _, _, _ = shared
    full, empty, q_full, q_empty, _, _, _, _, _ = barriers
    length_p, at, last, n, begin, capacity, _, member, members, row = share
    k, segment = 0, 0
    while at < last:
        end = gl.minimum(gl.load(length_p + n), capacity)
        tiles = _tiles(end)
        stop = gl.minimum(begin + tiles, last)
        first, behind = at - begin + member, stop - begin
        if first < behind:
            table_n = table_p + n.to(gl.int64) * table_stride
            page = _page(table_n, first, behind, PAGE)
            mbarrier.wait(q_empty, (segment & 1) ^ 1)
            mbarrier.expect(q_full, BOXES * BOX_BYTES)
            for b in gl.static_range(BOXES):
                tma.async_copy_global_to_shared(
                    q_d, [n * query_rows + row, _first_channel(b)], q_full, q_s.index(b)
                )
            for tile in range(first, behind, members):
                if PAGE == 0:
                    in_page = tile * BLOCK
                else:
                    in_page = tile % (PAGE // BLOCK) * BLOCK
                at_row = gl.where(page >= 0, page * page_rows + in_page, -BLOCK)
                page = _page(table_n, tile + members, behind, PAGE)
                for b in gl.static_range(BOXES):
                    place = (k & 1) * BOXES + b
                    mbarrier.wait(empty.index(place), ((k >> 1) & 1) ^ 1)
                    mbarrier.expect(full.index(place), BOX_BYTES)
                    tma.async_copy_global_to_shared(
                        c_d, [at_row, _first_channel(b)], full.index(place), c_s.index(place)
                    )
                k += 1
            segment += 1
        at = stop
        begin += tiles
        n += 1


@gluon.jit
def _score(
    table_p, lse_p, shared, barriers, share, table_stride, scale,
    ROWS: gl.constexpr, Q: gl.constexpr, H: gl.constexpr, PAGE: gl.constexpr,
):  # fmt: skip
    q_s, c_s, p_s, faded_s, inverse_s = shared
    full, empty, q_full, q_empty, p_full, p_empty, scored, finished, settled = barriers
    length_p, at, last, n, begin, capacity, team, member, members, row = share
    mma: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 64, 16])
    of_rows: gl.constexpr = gl.SliceLayout(1, mma)
    of_tokens: gl.constexpr = gl.SliceLayout(0, mma)
    loaded: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0])
    row_S = row + gl.arange(0, BLOCK, of_rows)
    n_ = gl.arange(0, BLOCK, of_tokens)
    k, segment = 0, 0
    while at < last:
        length = gl.load(length_p + n)
        end = gl.minimum(length, capacity)
        tiles = _tiles(end)
        stop = gl.minimum(begin + tiles, last)
        first, behind = at - begin + member, stop - begin
        highest_S = gl.full([BLOCK], LOWEST, gl.float32, of_rows)
        total_S = gl.full([BLOCK], 0.0, gl.float32, of_rows)
        if first < behind:
            table_n = table_p + n.to(gl.int64) * table_stride
            limit_S = length - (Q - 1) + row_S // H
            page = _page(table_n, first, behind, PAGE)
            mbarrier.wait(q_full, segment & 1)
            for tile in range(first, behind, members):
                here = gl.where(page >= 0, end, 0)
                page = _page(table_n, tile + members, behind, PAGE)
                slot = (k & 1) * BOXES
                s_SN = gl.full([BLOCK, BLOCK], 0.0, gl.float32, mma)
                for b in gl.static_range(BOXES):
                    mbarrier.wait(full.index(slot + b), (k >> 1) & 1)
                    c_CN = c_s.index(slot + b).permute((1, 0))
                    s_SN = warpgroup_mma(q_s.index(b), c_CN, s_SN, use_acc=b > 0, is_async=True)
                s_SN = warpgroup_mma_wait(0, deps=[s_SN])
                mbarrier.arrive(empty.index(slot))
                mbarrier.arrive(scored)
                token_N = tile * BLOCK + n_
                seen_SN = token_N[None, :] < gl.minimum(limit_S, here)[:, None]
                s_SN = gl.where(seen_SN, s_SN * scale, float("-inf"))
                top_S = gl.maximum(highest_S, gl.max(s_SN, axis=1))
                s_SN = _exp2(s_SN - top_S[:, None])
                faded_S = _exp2(highest_S - top_S)
                total_S = total_S * faded_S + gl.sum(s_SN, axis=1)
                highest_S = top_S
                if end < (tile + 1) * BLOCK:
                    # What lies behind the last row may be NaN, which no share of zero outweighs.
                    row_N = tile * BLOCK + gl.arange(0, BLOCK, gl.SliceLayout(1, loaded))
                    for b in gl.static_range(BOXES - 1):
                        box = c_s.index(slot + 1 + b)
                        c_NC = box.load(loaded)
                        box.store(gl.where((row_N < end)[:, None], c_NC, 0.0))
                    fence_async_shared()
                mbarrier.wait(p_empty, (k & 1) ^ 1)
                p_s.store(s_SN.to(gl.bfloat16))
                faded_s.store(faded_S)
                mbarrier.arrive(p_full)
                k += 1
            mbarrier.arrive(q_empty)
            inverse_S = gl.where(total_S > 0, 1.0 / total_S, 0.0)
            mbarrier.wait(settled, (segment & 1) ^ 1)
            inverse_s.store(inverse_S)
            mbarrier.arrive(finished)
            segment += 1
        if stop > at:
            slot_p = lse_p + ((team + n) * members + member).to(gl.int64) * ROWS
            gl.store(slot_p + row_S, highest_S + gl.log2(total_S), mask=row_S < ROWS)
        at = stop
        begin += tiles
        n += 1


@gluon.jit
def _mix(partial_p, shared, barriers, share, ROWS: gl.constexpr, HALF: gl.constexpr):
    _, c_s, p_s, faded_s, inverse_s = shared
    _, empty, _, _, p_full, p_empty, scored, finished, settled = barriers
    length_p, at, last, n, begin, capacity, team, member, members, row = share
    mma: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 64, 16])
    of_rows: gl.constexpr = gl.SliceLayout(1, mma)
    operand: gl.constexpr = gl.DotOperandLayout(0, mma, 2)
    row_S = row + gl.arange(0, BLOCK, of_rows)
    c_ = gl.arange(0, BLOCK, gl.SliceLayout(0, mma))
    k, segment = 0, 0
    while at < last:
        tiles = _tiles(gl.minimum(gl.load(length_p + n), capacity))
        stop = gl.minimum(begin + tiles, last)
        first, behind = at - begin + member, stop - begin
        if first < behind:
            o0 = gl.full([BLOCK, BLOCK], 0.0, gl.float32, mma)
            o1 = gl.full([BLOCK, BLOCK], 0.0, gl.float32, mma)
            o2 = gl.full([BLOCK, BLOCK], 0.0, gl.float32, mma)
            o3 = gl.full([BLOCK, BLOCK], 0.0, gl.float32, mma)
            for tile in range(first, behind, members):
                slot = (k & 1) * BOXES + 1 + HALF
                mbarrier.wait(p_full, k & 1)
                p_SN = p_s.load(operand)
                faded_S1 = faded_s.load(of_rows)[:, None]
                mbarrier.arrive(p_empty)
                o0, o1, o2, o3 = o0 * faded_S1, o1 * faded_S1, o2 * faded_S1, o3 * faded_S1
                if tile + members < behind:
                    mbarrier.wait(scored, (k + 1) & 1)
                o0 = warpgroup_mma(p_SN, c_s.index(slot), o0, is_async=True)
                o1 = warpgroup_mma(p_SN, c_s.index(slot + 2), o1, is_async=True)
                o2 = warpgroup_mma(p_SN, c_s.index(slot + 4), o2, is_async=True)
                o3 = warpgroup_mma(p_SN, c_s.index(slot + 6), o3, is_async=True)
                o0 = warpgroup_mma_wait(3, deps=[o0])
                mbarrier.arrive(empty.index(slot))
                o1 = warpgroup_mma_wait(2, deps=[o1])
                mbarrier.arrive(empty.index(slot + 2))
                o2 = warpgroup_mma_wait(1, deps=[o2])
                mbarrier.arrive(empty.index(slot + 4))
                o3 = warpgroup_mma_wait(0, deps=[o3])
                mbarrier.arrive(empty.index(slot + 6))
                k += 1
            mbarrier.wait(finished, segment & 1)
            inverse_S1 = inverse_s.load(of_rows)[:, None]
            mbarrier.arrive(settled)
            slot_p = partial_p + ((team + n) * members + member).to(gl.int64) * (ROWS * 512)
            at_SC = slot_p + row_S[:, None] * 512 + c_[None, :] + HALF * 256
            here_SC = (row_S < ROWS)[:, None] & (c_ < BLOCK)[None, :]
            gl.store(at_SC, o0 * inverse_S1, mask=here_SC)
            gl.store(at_SC + 64, o1 * inverse_S1, mask=here_SC)
            gl.store(at_SC + 128, o2 * inverse_S1, mask=here_SC)
            gl.store(at_SC + 192, o3 * inverse_S1, mask=here_SC)
            segment += 1
        at = stop
        begin += tiles
        n += 1


@gluon.jit(do_not_specialize=["sequences", "capacity", "teams", "members"])
def attend_wide(
    q_d,
    c_d,
    table_p,
    length_p,
    begin_p,
    partial_p,
    lse_p,
    sequences,
    capacity,
    teams,
    members,
    query_rows,
    page_rows,
    table_stride,
    scale,
    ROWS: gl.constexpr,
    Q: gl.constexpr,
    H: gl.constexpr,
    PAGE: gl.constexpr,
):
    TILES: gl.constexpr = (ROWS + BLOCK - 1) // BLOCK
    row = gl.program_id(0) % TILES * BLOCK
    member = gl.program_id(0) // TILES % members
    team = gl.program_id(0) // (TILES * members)
    # As in `triton_decode_share`.
    line: gl.constexpr = gl.BlockedLayout([2], [32], [4], [0])
    i_B = gl.arange(0, SEQUENCES, line)
    total = 0
    for from_n in range(0, sequences, SEQUENCES):
        n_B = from_n + i_B
        rows_B = gl.load(length_p + n_B, mask=n_B < sequences, other=0)
        total += gl.sum(_tiles(gl.minimum(rows_B, capacity)), axis=0)
    quota = (total + teams - 1) // teams
    at = gl.minimum(team * quota, total)
    last = gl.minimum(at + quota, total)
    n, begin, before = 0, 0, 0
    if gl.program_id(0) == 0:
        gl.store(begin_p, 0)
    for from_n in range(0, sequences, SEQUENCES):
        n_B = from_n + i_B
        rows_B = gl.load(length_p + n_B, mask=n_B < sequences, other=0)
        tiles_B = _tiles(gl.minimum(rows_B, capacity))
        ends_B = before + gl.associative_scan(tiles_B, 0, _add)
        if gl.program_id(0) == 0:
            gl.store(begin_p + 1 + n_B, ends_B, mask=n_B < sequences)
        passed_B = (ends_B <= at) & (n_B < sequences)
        n += gl.sum(passed_B.to(gl.int32), axis=0)
        begin += gl.sum(gl.where(passed_B, tiles_B, 0), axis=0)
        before += gl.sum(tiles_B, axis=0)

    boxes: gl.constexpr = gl.NVMMASharedLayout(128, 16, 2)
    plain: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    bars: gl.constexpr = mbarrier.MBarrierLayout()
    q_s = gl.allocate_shared_memory(gl.bfloat16, [BOXES, BLOCK, BLOCK], boxes)
    c_s = gl.allocate_shared_memory(gl.bfloat16, [2 * BOXES, BLOCK, BLOCK], boxes)
    p_s = gl.allocate_shared_memory(gl.bfloat16, [BLOCK, BLOCK], boxes)
    faded_s = gl.allocate_shared_memory(gl.float32, [BLOCK], plain)
    inverse_s = gl.allocate_shared_memory(gl.float32, [BLOCK], plain)
    full = gl.allocate_shared_memory(gl.int64, [2 * BOXES, 1], bars)
    empty = gl.allocate_shared_memory(gl.int64, [2 * BOXES, 1], bars)
    q_full = gl.allocate_shared_memory(gl.int64, [1], bars)
    q_empty = gl.allocate_shared_memory(gl.int64, [1], bars)
    p_full = gl.allocate_shared_memory(gl.int64, [1], bars)
    p_empty = gl.allocate_shared_memory(gl.int64, [1], bars)
    scored = gl.allocate_shared_memory(gl.int64, [1], bars)
    finished = gl.allocate_shared_memory(gl.int64, [1], bars)
    settled = gl.allocate_shared_memory(gl.int64, [1], bars)
    for b in gl.static_range(2 * BOXES):
        mbarrier.init(full.index(b), count=1)
        mbarrier.init(empty.index(b), count=1)
    mbarrier.init(q_full, count=1)
    mbarrier.init(q_empty, count=1)
    mbarrier.init(p_full, count=1)
    mbarrier.init(p_empty, count=2)
    mbarrier.init(scored, count=1)
    mbarrier.init(finished, count=1)
    mbarrier.init(settled, count=2)
    fence_async_shared()

    shared = (q_s, c_s, p_s, faded_s, inverse_s)
    barriers = (full, empty, q_full, q_empty, p_full, p_empty, scored, finished, settled)
    share = (length_p, at, last, n, begin, capacity, team, member, members, row)
    gl.warp_specialize(
        [
            (_mix, (partial_p, shared, barriers, share, ROWS, 0)),
            (_mix, (partial_p, shared, barriers, share, ROWS, 1)),
            (
                _score,
                (table_p, lse_p, shared, barriers, share, table_stride, scale, ROWS, Q, H, PAGE),
            ),
            (
                _fetch,
                (
                    q_d,
                    c_d,
                    table_p,
                    shared,
                    barriers,
                    share,
                    query_rows,
                    page_rows,
                    table_stride,
                    PAGE,
                ),
            ),
        ],
        [4, 4, 1],
        [184, 120, 24],
    )


def launch_wide(q_NQHC: Tensor, rows: Any, parts: Any, scale: float, plan: Plan) -> None:
    """In place of `triton_decode._launch_wide`, for one pool with rows of 512 + 64 channels."""
    _, begin, partial, lse = parts
    (n, q, h, width), pool = q_NQHC.shape, rows.c_PSC
    boxes = gl.NVMMASharedLayout(128, 16, 2)
    num_rows = pool.shape[0] * pool.shape[1]
    attend_wide[(plan.wide_programs,)](
        TensorDescriptor(q_NQHC.contiguous(), [n * q * h, width], [width, 1], [64, 64], boxes),
        TensorDescriptor(pool, [num_rows, width], [pool.stride(1), 1], [64, 64], boxes),
        rows.table_NW,
        rows.length_N,
        begin,
        partial,
        lse,
        n,
        rows.capacity,
        plan.teams,
        plan.wide_members,
        q * h,
        pool.shape[1],
        rows.table_NW.stride(0),
        scale * LOG2_E.value,
        ROWS=plan.wide_rows,
        Q=q,
        H=h,
        PAGE=rows.page,
        num_warps=4,
    )
