"""The read forward. Of few tokens: a program holds every source of one at once, each read once.

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

from perilune.kernels.attn_res.triton_rows import moments, wide_again
from perilune.kernels.attn_res.triton_stream import stream
from perilune.kernels.common.triton_math import LOG2_E, exp2, launches_early, uses_ptx

ELEMENTS = 32
"""Of a row, a thread: with fewer threads there is less to add up between them."""
HELD_BYTES = 640
"""Of rows, that the registers of a thread hold beside what it works on; more pass as a stream."""
SHARED_BYTES = 192 << 10
PROGRAMS = 132
"""As many as a GPU has multiprocessors; more tokens are taken in turn."""
FULL = 8
"""Warps that take all registers of a multiprocessor."""
FEW_TOKENS = 256
"""Up to here a read is as long as its launch; rows of more tokens pass as a stream."""


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
    """Rows that a stream loads ahead; 0: no stream, a program holds all sources of a token."""


def blocks(width: int, elements: int) -> tuple[int, int]:
    """Elements of a padded row, and warps that hold `elements` of it in a thread."""
    padded = triton.next_power_of_2(width)
    return padded, min(32, max(1, padded // (32 * elements)))


def at_once(num_warps: int) -> int:
    """Programs that a GPU runs side by side, each with as many registers as a thread may have."""
    return PROGRAMS * max(1, FULL // num_warps)


def plan(num_tokens: int, width: int, num_rows: int, element_bytes: int) -> Plan:
    padded, warps = blocks(width, ELEMENTS)
    held = num_rows * ELEMENTS * element_bytes
    if num_tokens <= FEW_TOKENS and held <= HELD_BYTES * FULL // max(FULL, warps):
        return Plan(padded, warps, num_tokens)
    ahead = max(2, min(5, SHARED_BYTES // (padded * element_bytes)))
    return Plan(padded, warps, min(num_tokens, 2 * at_once(warps)), ahead)


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
    rows = [*halves, *sources[:-1]] if how.ahead else [*sources[:-1], *halves]
    options = _options(how, last)
    launch: Any = (stream if how.ahead else _forward)[(how.programs,)]
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
    """A read of few tokens is set up while the kernel before it ends. Other targets refuse what
    only NVIDIA's know."""
    if how.ahead:
        return {"STAGES": how.ahead}
    early = launches_early(like.device)
    return {"OVERLAPS": early, **({"launch_pdl": True} if early else {})}


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
    OVERLAPS: tl.constexpr,
):
    if OVERLAPS:
        gdc_wait()
        gdc_launch_dependents()
    R: tl.constexpr = len(rows)
    M: tl.constexpr = R if partial_p is None else R - 1
    eps = tl.full([], eps, tl.float32)
    norm_eps = tl.full([], norm_eps, tl.float32)
    token = tl.program_id(0).to(tl.int64)
    d_ = tl.arange(0, BD)
    here_D = d_ < D
    values = ()
    for n in tl.static_range(M - 1):
        v_D = tl.load(rows[n] + token * strides[n] + d_, mask=here_D, other=0.0)
        values += (v_D,)
    sum_D = tl.load(rows[M - 1] + token * strides[M - 1] + d_, mask=here_D, other=0.0)
    if partial_p is not None:
        u_D = tl.load(rows[M] + token * strides[M] + d_, mask=here_D, other=0.0)
    q_D = tl.load(query_p + d_, mask=here_D, other=0.0).to(tl.float32)
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
