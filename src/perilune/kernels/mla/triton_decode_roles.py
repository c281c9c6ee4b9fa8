"""Programs of MLA decode for K3's 512 + 64 channels in Gluon: warp groups with roles.

Legend: S 64 query rows of a tile (`row = query token * heads + head`), N 64 tokens of a tile, C
channels.

One warp fetches (`triton_decode_boxes`), one warp group has the scores and their softmax, two have
half of the outputs each. Scores of tile k + 1 come before outputs of tile k, so that tensor cores
have those to do during the softmax. `triton_decode_plain` is the same without roles.
"""

from __future__ import annotations

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
from perilune.kernels.mla.triton_decode_boxes import (
    BLOCK,
    BOXES,
    LOWEST,
    RING,
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
from perilune.kernels.mla.triton_decode_plan import Parts, Plan
from perilune.kernels.mla.triton_decode_rows import Rows


@gluon.jit
def _score(operands, ROWS: gl.constexpr, Q: gl.constexpr, H: gl.constexpr, PAGE: gl.constexpr):
    table_p, lse_p, shared, barriers, share, table_stride, scale = operands
    q_s, c_s, p_s, faded_s, inverse_s = shared
    full, empty, q_full, q_empty, p_full, p_empty, scored, finished, settled = barriers
    length_p, at, last, n, begin, capacity, team, row = share
    mma: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 64, 16])
    of_rows: gl.constexpr = gl.SliceLayout(1, mma)
    row_S = row + gl.arange(0, BLOCK, of_rows)
    n_ = gl.arange(0, BLOCK, gl.SliceLayout(0, mma))
    k, segment = 0, 0
    while at < last:
        length = gl.load(length_p + n)
        end = gl.minimum(length, capacity)
        tiles = tiles_of(end)
        stop = gl.minimum(begin + tiles, last)
        first, behind = at - begin, stop - begin
        highest_S = gl.full([BLOCK], LOWEST, gl.float32, of_rows)
        total_S = gl.full([BLOCK], 0.0, gl.float32, of_rows)
        if first < behind:
            table_n = table_p + n.to(gl.int64) * table_stride
            limit_S = length - (Q - 1) + row_S // H
            page = page_of(table_n, first, behind, PAGE)
            mbarrier.wait(q_full, segment & 1)
            for tile in range(first, behind):
                here = gl.where(page >= 0, end, 0)
                page = page_of(table_n, tile + 1, behind, PAGE)
                s_SN = gl.full([BLOCK, BLOCK], 0.0, gl.float32, mma)
                for b in gl.static_range(BOXES):
                    place = place_of_box(k, b)
                    mbarrier.wait(full.index(place), filled_before(k, b) & 1)
                    c_CN = c_s.index(place).permute((1, 0))
                    s_SN = warpgroup_mma(q_s.index(b), c_CN, s_SN, use_acc=b > 0, is_async=True)
                s_SN = warpgroup_mma_wait(0, deps=[s_SN])
                mbarrier.arrive(empty.index(place_of_box(k, 0)))
                mbarrier.arrive(scored)
                token_N = tile * BLOCK + n_
                seen_SN = token_N[None, :] < gl.minimum(limit_S, here)[:, None]
                s_SN = gl.where(seen_SN, s_SN * scale, float("-inf"))
                top_S = gl.maximum(highest_S, gl.max(s_SN, axis=1))
                s_SN = exp2(s_SN - top_S[:, None])
                faded_S = exp2(highest_S - top_S)
                total_S = total_S * faded_S + gl.sum(s_SN, axis=1)
                highest_S = top_S
                if end < (tile + 1) * BLOCK:
                    clear_behind(c_s, k, end - tile * BLOCK)
                    fence_async_shared()
                mbarrier.wait(p_empty, (k & 1) ^ 1)
                p_s.store(s_SN.to(gl.bfloat16))
                faded_s.store(faded_S)
                mbarrier.arrive(p_full)
                k += 1
            mbarrier.arrive(q_empty)
            mbarrier.wait(settled, (segment & 1) ^ 1)
            inverse_s.store(gl.where(total_S > 0, 1.0 / total_S, 0.0))
            mbarrier.arrive(finished)
            segment += 1
        if stop > at:
            slot_p = lse_p + (team + n).to(gl.int64) * ROWS
            gl.store(slot_p + row_S, highest_S + gl.log2(total_S), mask=row_S < ROWS)
        at = stop
        begin += tiles
        n += 1


@gluon.jit
def _mix(partial_p, shared, barriers, share, ROWS: gl.constexpr, HALF: gl.constexpr):
    _, c_s, p_s, faded_s, inverse_s = shared
    _, empty, _, _, p_full, p_empty, scored, finished, settled = barriers
    length_p, at, last, n, begin, capacity, team, row = share
    mma: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 64, 16])
    of_rows: gl.constexpr = gl.SliceLayout(1, mma)
    operand: gl.constexpr = gl.DotOperandLayout(0, mma, 2)
    row_S = row + gl.arange(0, BLOCK, of_rows)
    c_ = gl.arange(0, BLOCK, gl.SliceLayout(0, mma))
    k, segment = 0, 0
    while at < last:
        tiles = tiles_of(gl.minimum(gl.load(length_p + n), capacity))
        stop = gl.minimum(begin + tiles, last)
        first, behind = at - begin, stop - begin
        if first < behind:
            o0 = gl.full([BLOCK, BLOCK], 0.0, gl.float32, mma)
            o1 = gl.full([BLOCK, BLOCK], 0.0, gl.float32, mma)
            o2 = gl.full([BLOCK, BLOCK], 0.0, gl.float32, mma)
            o3 = gl.full([BLOCK, BLOCK], 0.0, gl.float32, mma)
            for tile in range(first, behind):
                place0 = place_of_box(k, 1 + HALF)
                place1 = place_of_box(k, 3 + HALF)
                place2 = place_of_box(k, 5 + HALF)
                place3 = place_of_box(k, 7 + HALF)
                mbarrier.wait(p_full, k & 1)
                p_SN = p_s.load(operand)
                faded_S1 = faded_s.load(of_rows)[:, None]
                mbarrier.arrive(p_empty)
                o0, o1, o2, o3 = o0 * faded_S1, o1 * faded_S1, o2 * faded_S1, o3 * faded_S1
                if tile + 1 < behind:
                    mbarrier.wait(scored, (k + 1) & 1)
                o0 = warpgroup_mma(p_SN, c_s.index(place0), o0, is_async=True)
                o1 = warpgroup_mma(p_SN, c_s.index(place1), o1, is_async=True)
                o2 = warpgroup_mma(p_SN, c_s.index(place2), o2, is_async=True)
                o3 = warpgroup_mma(p_SN, c_s.index(place3), o3, is_async=True)
                o0 = warpgroup_mma_wait(3, deps=[o0])
                mbarrier.arrive(empty.index(place0))
                o1 = warpgroup_mma_wait(2, deps=[o1])
                mbarrier.arrive(empty.index(place1))
                o2 = warpgroup_mma_wait(1, deps=[o2])
                mbarrier.arrive(empty.index(place2))
                o3 = warpgroup_mma_wait(0, deps=[o3])
                mbarrier.arrive(empty.index(place3))
                k += 1
            mbarrier.wait(finished, segment & 1)
            inverse_S1 = inverse_s.load(of_rows)[:, None]
            mbarrier.arrive(settled)
            slot_p = partial_p + (team + n).to(gl.int64) * (ROWS * 512)
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


@gluon.jit(
    do_not_specialize=["sequences", "capacity", "teams", "query_rows", "page_rows", "table_stride"]
)
def _attend(
    q_d, c_d, table_p, length_p, begin_p, partial_p, lse_p,
    sequences, capacity, teams, query_rows, page_rows, table_stride, scale,
    ROWS: gl.constexpr, Q: gl.constexpr, H: gl.constexpr, PAGE: gl.constexpr,
):  # fmt: skip
    """As in `triton_decode_plain`."""
    TILES: gl.constexpr = (ROWS + BLOCK - 1) // BLOCK
    row = gl.program_id(0) % TILES * BLOCK
    team = gl.program_id(0) // TILES
    at, last, n, begin = share_of(length_p, begin_p, sequences, capacity, teams, team)
    boxes: gl.constexpr = gl.NVMMASharedLayout(128, 16, 2)
    plain: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    shared = (
        gl.allocate_shared_memory(gl.bfloat16, [BOXES, BLOCK, BLOCK], boxes),
        gl.allocate_shared_memory(gl.bfloat16, [RING, BLOCK, BLOCK], boxes),
        gl.allocate_shared_memory(gl.bfloat16, [BLOCK, BLOCK], boxes),
        gl.allocate_shared_memory(gl.float32, [BLOCK], plain),
        gl.allocate_shared_memory(gl.float32, [BLOCK], plain),
    )
    bars = barriers_of()
    share = (length_p, at, last, n, begin, capacity, team, row)
    scored = (table_p, lse_p, shared, bars, share, table_stride, scale)
    rows = (query_rows, page_rows, table_stride)
    fetched = (q_d, c_d, table_p, shared, bars, share, rows)
    gl.warp_specialize(
        [
            (_mix, (partial_p, shared, bars, share, ROWS, 0)),
            (_mix, (partial_p, shared, bars, share, ROWS, 1)),
            (_score, (scored, ROWS, Q, H, PAGE)),
            (fetch, (fetched, PAGE)),
        ],
        [4, 4, 1],
        [176, 136, 24],
    )


def launch(q_NQHC: Tensor, rows: Rows, parts: Parts, scale: float, plan: Plan) -> None:
    """As `triton_decode_plain.launch`, for a pool that comes in boxes."""
    (n, q, h, width), pool = q_NQHC.shape, rows.c_PSC
    boxes = gl.NVMMASharedLayout(128, 16, 2)
    num_rows = pool.shape[0] * pool.shape[1]
    _attend[(plan.programs,)](
        TensorDescriptor(q_NQHC.contiguous(), [n * q * h, width], [width, 1], [64, 64], boxes),
        TensorDescriptor(pool, [num_rows, width], [pool.stride(1), 1], [64, 64], boxes),
        rows.table_NW,
        rows.length_N,
        *parts,
        n,
        rows.capacity,
        plan.teams,
        q * h,
        pool.shape[1],
        rows.table_NW.stride(0),
        scale * LOG2_E.value,
        ROWS=plan.rows,
        Q=q,
        H=h,
        PAGE=rows.page,
        num_warps=4,
    )
