"""The read forward: a program holds every source of a token at once, each read once.

Legend: T packed tokens, D model width, N committed blocks, M = N + 1 sources, the running sum
last, R rows that a token reads: with the update, one more; S 2 M + 2 statistics.

Sources lie anywhere, a pointer each. All loads are under way before the first is needed. Floats
become fp32 inside, since a compiled graph hands them over in fp64.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from perilune.kernels.attn_res.triton_rows import ask, moments, wide_again
from perilune.kernels.attn_res.triton_stream import stream
from perilune.kernels.common.triton_math import LOG2_E, exp2, launches_early, uses_ptx

ELEMENTS = 32
"""Of a row, a thread: with fewer threads there is less to add up between them."""
HELD_BYTES = 640
"""Of rows, that the registers of a thread hold beside what it works on; more pass as a stream, and
of half as much two programs fit beside each other."""
SHARED_BYTES = 192 << 10
PROGRAMS = 132
"""As many as a GPU has multiprocessors; more tokens are taken in turn."""
FULL = 8
"""Warps that take all registers of a multiprocessor; at 128 a thread, twice as many do."""
FEW_TOKENS = 256
"""Up to here a read is as long as its launch."""


class Mixture(NamedTuple):
    h_TD: Tensor
    partial_TD: Tensor | None
    """The running sum with the update in it; None without an update."""
    stats_ST: Tensor | None
    """fp32: log2 of the sum of 2^score; the M scores, times log2 e; the M inverse root mean
    squares; that of the mixture. None where nobody asks for gradients."""


class Plan(NamedTuple):
    """How the tokens are spread over programs."""

    width: int
    """Next power of two of D."""
    num_warps: int
    programs: int
    ahead: int = 0
    """How many tokens later the one is whose sources are asked for; of a stream, rows."""
    streams: bool = False
    """Rows pass one by one; else a program holds all sources of a token."""
    registers: int | None = None
    """A limit for each thread, so that more programs fit beside each other."""


def blocks(width: int, elements: int) -> tuple[int, int]:
    """Elements of a padded row, and warps that hold `elements` of it in a thread."""
    padded = triton.next_power_of_2(width)
    return padded, min(32, max(1, padded // (32 * elements)))


def at_once(num_warps: int) -> int:
    """Programs that a GPU runs side by side, each with as many registers as a thread may have."""
    return PROGRAMS * max(1, FULL // num_warps)


def plan(num_tokens: int, width: int, num_rows: int, element_bytes: int) -> Plan:
    padded, warps = blocks(width, ELEMENTS)
    side_by_side = at_once(warps)
    held = num_rows * ELEMENTS * element_bytes
    if held > HELD_BYTES * FULL // max(FULL, warps):
        ahead = max(2, min(5, SHARED_BYTES // (padded * element_bytes)))
        programs = min(num_tokens, 2 * side_by_side)
        return Plan(padded, warps, programs, ahead=ahead, streams=True)
    twice = 2 * held <= HELD_BYTES
    programs = 2 * side_by_side if twice else side_by_side
    return Plan(
        width=padded,
        num_warps=warps,
        programs=min(num_tokens, programs),
        ahead=programs if num_tokens > programs else 0,
        registers=128 if twice else None,
    )


def forward(
    sources: Sequence[Tensor],
    query_D: Tensor,
    eps: float,
    update_TD: Tensor | None,
    weight_D: Tensor | None,
    norm_eps: float,
    *,
    keep: bool,
    how: Plan | None = None,
) -> Mixture:
    """Rows of stride 1, the running sum last; `keep` what backward asks for again."""
    last = sources[-1]
    t, d = last.shape
    h_TD = last.new_empty(t, d)
    partial_TD = None if update_TD is None else last.new_empty(t, d)
    stats_ST = last.new_empty(2 * len(sources) + 2, t, dtype=torch.float32) if keep else None
    num_rows = len(sources) + (update_TD is not None)
    how = how or plan(t, d, num_rows, last.element_size())
    halves = [last] if update_TD is None else [last, update_TD]
    rows = [*halves, *sources[:-1]] if how.streams else [*sources[:-1], *halves]
    options = _options(how, last)
    launch: Any = (stream if how.streams else _forward)[(how.programs,)]
    if t:
        launch(
            tuple(rows),
            tuple(x.stride(0) for x in rows),
            query_D,
            weight_D,
            h_TD,
            partial_TD,
            stats_ST,
            t,
            eps,
            norm_eps,
            D=d,
            BD=how.width,
            PTX=uses_ptx(h_TD.device),
            num_warps=how.num_warps,
            **options,
        )
    return Mixture(h_TD, partial_TD, stats_ST)


def _options(how: Plan, like: Tensor) -> dict[str, Any]:
    """Other targets refuse what only NVIDIA's know. A read of few tokens is set up while the kernel
    before it ends."""
    early = not how.streams and len(like) <= FEW_TOKENS and launches_early(like.device)
    ahead = how.ahead if uses_ptx(like.device) else 0
    options: dict[str, Any] = {"STAGES": max(2, how.ahead)}
    if not how.streams:
        options = {"AHEAD": ahead, "OVERLAPS": early}
    if early:
        options["launch_pdl"] = True
    if how.registers and uses_ptx(like.device):
        options["maxnreg"] = how.registers
    return options


@triton.jit
def _forward(
    rows,
    strides,
    query_p,
    weight_p,
    h_p,
    partial_p,
    stats_p,
    num_tokens,
    eps,
    norm_eps,
    D: tl.constexpr,
    BD: tl.constexpr,
    PTX: tl.constexpr,
    AHEAD: tl.constexpr,
    OVERLAPS: tl.constexpr,
):
    if OVERLAPS:
        gdc_wait()
        gdc_launch_dependents()
    R: tl.constexpr = len(rows)
    M: tl.constexpr = R if partial_p is None else R - 1
    eps = tl.full([], eps, tl.float32)
    norm_eps = tl.full([], norm_eps, tl.float32)
    first = tl.zeros([], tl.int64)
    d_ = tl.arange(0, BD)
    here_D = d_ < D
    for i in range(tl.program_id(0), num_tokens, tl.num_programs(0)):
        token = first + i
        values = ()
        for n in tl.static_range(M - 1):
            v_D = tl.load(rows[n] + token * strides[n] + d_, mask=here_D, other=0.0)
            values += (v_D,)
        sum_D = tl.load(rows[M - 1] + token * strides[M - 1] + d_, mask=here_D, other=0.0)
        if partial_p is not None:
            u_D = tl.load(rows[M] + token * strides[M] + d_, mask=here_D, other=0.0)
        q_D = tl.load(query_p + d_, mask=here_D, other=0.0).to(tl.float32)
        if AHEAD > 0:
            later = tl.minimum(token + AHEAD, num_tokens - 1)
            for n in tl.static_range(0, R, 2):
                other_at = rows[min(n + 1, R - 1)] + later * strides[min(n + 1, R - 1)]
                ask(rows[n] + later * strides[n], other_at, D, BD)
        if partial_p is not None:
            sum_D = (sum_D.to(tl.float32) + u_D.to(tl.float32)).to(partial_p.dtype.element_ty)
            tl.store(partial_p + token * D + d_, sum_D, mask=here_D)
        values += (sum_D,)
        found = ()
        for n in tl.static_range(0, M, 4):
            found += moments(values, n, min(4, M - n), q_D, PTX)
        top = tl.full([], float("-inf"), tl.float32)
        scores = ()
        for n in tl.static_range(M):
            r = tl.rsqrt(found[2 * n] / D + eps)
            score = found[2 * n + 1] * r * LOG2_E
            top = tl.maximum(top, score)
            scores += (score,)
            if stats_p is not None:
                tl.store(stats_p + (1 + n) * num_tokens + token, score)
                tl.store(stats_p + (1 + M + n) * num_tokens + token, r)
        total = tl.zeros([], tl.float32)
        h_D = tl.zeros([BD], tl.float32)
        for n in tl.static_range(M):
            share = exp2(scores[n] - top, PTX)
            total += share
            h_D += share * wide_again(values[n], top, PTX)
        h_D /= total
        if stats_p is not None:
            tl.store(stats_p + token, top + tl.log2(total))
        if weight_p is not None:
            r = tl.rsqrt(tl.sum(h_D * h_D, axis=0) / D + norm_eps)
            w_D = tl.load(weight_p + d_, mask=here_D, other=0.0).to(tl.float32)
            h_D *= r * w_D
            if stats_p is not None:
                tl.store(stats_p + (1 + 2 * M) * num_tokens + token, r)
        tl.store(h_p + token * D + d_, h_D.to(h_p.dtype.element_ty), mask=here_D)
