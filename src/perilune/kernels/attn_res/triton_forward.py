"""The read forward: a program holds every source of a token at once, each read once.

Legend: T packed tokens, D model width, N committed blocks, M = N + 1 sources, the running sum
last, S 2 M + 2 statistics.

Sources lie anywhere, a pointer each. All loads are under way before the first is needed. Floats
become fp32 inside, since a compiled graph hands them over in fp64.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from perilune.kernels.common.triton_math import LOG2_E, exp2, uses_ptx

ELEMENTS = 16
"""Of a row, a thread."""


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
    stages: int
    """2: a program of many tokens loads the next one's sources ahead."""


def plan(num_tokens: int, width: int) -> Plan:
    padded = triton.next_power_of_2(width)
    warps = min(32, max(1, padded // (32 * ELEMENTS)))
    return Plan(padded, warps, num_tokens, 1)


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
    """Rows of stride 1; `keep` what backward asks for again."""
    first = sources[0]
    t, d = first.shape
    h_TD = first.new_empty(t, d)
    partial_TD = None if update_TD is None else first.new_empty(t, d)
    stats_ST = first.new_empty(2 * len(sources) + 2, t, dtype=torch.float32) if keep else None
    how = how or plan(t, d)
    if t:
        _forward[(how.programs,)](
            tuple(sources),
            tuple(x.stride(0) for x in sources),
            update_TD,
            0 if update_TD is None else update_TD.stride(0),
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
            STAGES=how.stages,
            num_warps=how.num_warps,
        )
    return Mixture(h_TD, partial_TD, stats_ST)


@triton.jit
def _add_pairs(a0, a1, b0, b1):
    return a0 + b0, a1 + b1


@triton.jit
def _add_eights(
    a0, a1, a2, a3, a4, a5, a6, a7, b0, b1, b2, b3, b4, b5, b6, b7
):  # fmt: skip
    return a0 + b0, a1 + b1, a2 + b2, a3 + b3, a4 + b4, a5 + b5, a6 + b6, a7 + b7


@triton.jit
def sums(a_D, b_D, PTX: tl.constexpr):
    """Of both, with one exchange between the warps. An interpreter would add the pairs one by
    one."""
    if PTX:
        return tl.reduce((a_D, b_D), 0, _add_pairs)
    else:
        return tl.sum(a_D, axis=0), tl.sum(b_D, axis=0)


@triton.jit
def again(v_D, after, PTX: tl.constexpr):
    """The same numbers, of which a compiler does not know it, and which it cannot have before it
    has `after`: bf16 that was made fp32 once is made so again, where it would otherwise be kept in
    twice the registers."""
    if PTX and v_D.dtype == tl.bfloat16:
        # The third axis of a grid is one program wide, and that is known at the launch only.
        zero = tl.program_id(2) & after.to(tl.int32, bitcast=True)
        words = tl.inline_asm_elementwise(
            "xor.b32 $0, $1, $2;", "=r,r,r,r", [v_D, zero], dtype=tl.bfloat16, is_pure=True, pack=2
        )
        return words
    else:
        return v_D


@triton.jit
def moments(values, at: tl.constexpr, count: tl.constexpr, q_D, PTX: tl.constexpr):
    """Squares and products with q of `count` sources from `at` on: four at a time share one
    exchange between the warps."""
    if count == 4 and PTX:
        v0 = values[at].to(tl.float32)
        v1 = values[at + 1].to(tl.float32)
        v2 = values[at + 2].to(tl.float32)
        v3 = values[at + 3].to(tl.float32)
        return tl.reduce(
            (v0 * v0, v0 * q_D, v1 * v1, v1 * q_D, v2 * v2, v2 * q_D, v3 * v3, v3 * q_D),
            0,
            _add_eights,
        )
    else:
        found = ()
        for i in tl.static_range(count):
            v_D = values[at + i].to(tl.float32)
            found += sums(v_D * v_D, v_D * q_D, PTX)
        return found


@triton.jit
def _forward(
    sources,
    strides,
    update_p,
    update_stride,
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
    STAGES: tl.constexpr,
):
    M: tl.constexpr = len(sources)
    eps = tl.full([], eps, tl.float32)
    norm_eps = tl.full([], norm_eps, tl.float32)
    first = tl.zeros([], tl.int64)
    d_ = tl.arange(0, BD)
    here_D = d_ < D
    for i in tl.range(tl.program_id(0), num_tokens, tl.num_programs(0), num_stages=STAGES):
        token = first + i
        values = ()
        for n in tl.static_range(M - 1):
            v_D = tl.load(sources[n] + token * strides[n] + d_, mask=here_D, other=0.0)
            values += (v_D,)
        sum_D = tl.load(sources[M - 1] + token * strides[M - 1] + d_, mask=here_D, other=0.0)
        if update_p is not None:
            u_D = tl.load(update_p + token * update_stride + d_, mask=here_D, other=0.0)
            sum_D = (sum_D.to(tl.float32) + u_D.to(tl.float32)).to(partial_p.dtype.element_ty)
            tl.store(partial_p + token * D + d_, sum_D, mask=here_D)
        values += (sum_D,)
        q_D = tl.load(query_p + d_, mask=here_D, other=0.0).to(tl.float32)
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
            h_D += share * again(values[n], top, PTX).to(tl.float32)
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
