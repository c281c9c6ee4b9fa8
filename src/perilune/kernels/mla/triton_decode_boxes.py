"""Boxes of cached rows for the warp groups of `triton_decode_roles`: barriers, fetching, tails.

Legend: N 64 tokens of a tile, C channels, B sequences of a block.

A box is 64 tokens by 64 channels. One warp fetches them into a ring, each anew as soon as the
outputs have read it.

Barriers: `full` and `empty` of each box of the ring; `q_full` and `q_empty` of the queries of a
part; `p_full` and `p_empty` of a tile's shares; `scored` when its scores no longer need tensor
cores; `finished` and `settled` of what a part's outputs are divided by.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier, tma

BLOCK = gl.constexpr(64)
BOXES = gl.constexpr(9)
BOX_BYTES = gl.constexpr(64 * 64 * 2)
SEQUENCES = gl.constexpr(256)
LOWEST = gl.constexpr(-3.0e38)
RING = gl.constexpr(18)
"""Two tiles: more do not fit beside the queries."""


@gluon.jit
def _add(a, b):
    return a + b


@gluon.jit
def exp2(x):
    return gl.inline_asm_elementwise(
        "ex2.approx.ftz.f32 $0, $1;", "=f,f", [x], dtype=gl.float32, is_pure=True, pack=1
    )


@gluon.constexpr_function
def _first_channel(i: int) -> int:
    """Of the i-th box of a tile: the shared channels, then those of the halves of the outputs in
    turn, as they come free."""
    return 64 * (8 if i == 0 else (i - 1) // 2 + (i - 1) % 2 * 4)


@gluon.jit
def place_of_box(k, b):
    """Where in the ring box b of the k-th tile lies."""
    return (k * BOXES + b) % RING


@gluon.jit
def filled_before(k, b):
    """How often its place was."""
    return (k * BOXES + b) // RING


@gluon.jit
def tiles_of(rows):
    return (gl.maximum(rows, 0) + BLOCK - 1) // BLOCK


@gluon.jit
def page_of(table_p, tile, last, PAGE: gl.constexpr):
    if PAGE == 0:
        return gl.load(table_p)
    else:
        return gl.load(table_p + gl.minimum(tile, last - 1) // (PAGE // BLOCK))


@gluon.jit
def share_of(length_p, begin_p, sequences, capacity, teams, team):
    """As in `triton_decode_share`: the tiles at to last - 1 of the row are the team's; the first
    of them is of sequence n, before which there are `begin`."""
    line: gl.constexpr = gl.BlockedLayout([2], [32], [4], [0])
    i_B = gl.arange(0, SEQUENCES, line)
    total = 0
    for first in range(0, sequences, SEQUENCES):
        n_B = first + i_B
        rows_B = gl.load(length_p + n_B, mask=n_B < sequences, other=0)
        total += gl.sum(tiles_of(gl.minimum(rows_B, capacity)), axis=0)
    quota = (total + teams - 1) // teams
    at = gl.minimum(team * quota, total)
    last = gl.minimum(at + quota, total)
    n, begin, before = 0, 0, 0
    gl.store(begin_p, 0)
    for first in range(0, sequences, SEQUENCES):
        n_B = first + i_B
        rows_B = gl.load(length_p + n_B, mask=n_B < sequences, other=0)
        tiles_B = tiles_of(gl.minimum(rows_B, capacity))
        ends_B = before + gl.associative_scan(tiles_B, 0, _add)
        gl.store(begin_p + 1 + n_B, ends_B, mask=n_B < sequences)
        passed_B = (ends_B <= at) & (n_B < sequences)
        n += gl.sum(passed_B.to(gl.int32), axis=0)
        begin += gl.sum(gl.where(passed_B, tiles_B, 0), axis=0)
        before += gl.sum(tiles_B, axis=0)
    return at, last, n, begin


@gluon.jit
def barriers_of():
    bars: gl.constexpr = mbarrier.MBarrierLayout()
    full = gl.allocate_shared_memory(gl.int64, [RING, 1], bars)
    empty = gl.allocate_shared_memory(gl.int64, [RING, 1], bars)
    q_full = gl.allocate_shared_memory(gl.int64, [1], bars)
    q_empty = gl.allocate_shared_memory(gl.int64, [1], bars)
    p_full = gl.allocate_shared_memory(gl.int64, [1], bars)
    p_empty = gl.allocate_shared_memory(gl.int64, [1], bars)
    scored = gl.allocate_shared_memory(gl.int64, [1], bars)
    finished = gl.allocate_shared_memory(gl.int64, [1], bars)
    settled = gl.allocate_shared_memory(gl.int64, [1], bars)
    for b in gl.static_range(RING):
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
    return full, empty, q_full, q_empty, p_full, p_empty, scored, finished, settled


@gluon.jit
def fetch(operands, PAGE: gl.constexpr):
    q_d, c_d, table_p, shared, barriers, share, rows = operands
    query_rows, page_rows, table_stride = rows
    q_s, c_s, _, _, _ = shared
    full, empty, q_full, q_empty, _, _, _, _, _ = barriers
    length_p, at, last, n, begin, capacity, _, row = share
    k, segment = 0, 0
    while at < last:
        end = gl.minimum(gl.load(length_p + n), capacity)
        tiles = tiles_of(end)
        stop = gl.minimum(begin + tiles, last)
        first, behind = at - begin, stop - begin
        if first < behind:
            table_n = table_p + n.to(gl.int64) * table_stride
            page = page_of(table_n, first, behind, PAGE)
            mbarrier.wait(q_empty, (segment & 1) ^ 1)
            mbarrier.expect(q_full, BOXES * BOX_BYTES)
            for b in gl.static_range(BOXES):
                at_q = n * query_rows + row
                tma.async_copy_global_to_shared(
                    q_d, [at_q, _first_channel(b)], q_full, q_s.index(b)
                )
            for tile in range(first, behind):
                if PAGE == 0:
                    in_page = tile * BLOCK
                else:
                    in_page = tile % (PAGE // BLOCK) * BLOCK
                # Of no page: where there are no rows, so that zeros come.
                at_row = gl.where(page >= 0, page * page_rows + in_page, -BLOCK)
                page = page_of(table_n, tile + 1, behind, PAGE)
                for b in gl.static_range(BOXES):
                    place = place_of_box(k, b)
                    mbarrier.wait(empty.index(place), (filled_before(k, b) & 1) ^ 1)
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
def clear_behind(c_s, k, rows):
    """Zeros behind the last row, where NaN may lie, which no share of zero outweighs."""
    loaded: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0])
    here_N = gl.arange(0, BLOCK, gl.SliceLayout(1, loaded)) < rows
    for b in gl.static_range(BOXES - 1):
        box = c_s.index(place_of_box(k, 1 + b))
        c_NC = box.load(loaded)
        box.store(gl.where(here_N[:, None], c_NC, 0.0))
