"""Which rows a program of the grouped products takes, made on the device.

Legend: E experts, P pairs, I tiles of tokens, B tiles of a program.

A tile is up to `tokens` places of one expert. The host knows how many there can be, not how many
there are: programs of the rest leave at once.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from perilune.kernels.common.triton_math import launches_early
from perilune.kernels.registry import resolve

permute = resolve("permute")

BLOCK = 16
TOKENS = (16, 32, 64, 128)
FEW_PAIRS = 32
"""Up to here, and a quarter of the experts, a launch less is worth more than that no weight is read
twice."""
SLACK = 1.5
"""Experts' shares differ: a tile holds so many times the mean."""


def tokens_of_tile(pairs: int, num_experts: int, widest: int = TOKENS[-1]) -> int:
    """The narrowest that most experts fill once, of the pairs that an expert *in use* has."""
    used = num_experts * (1.0 - (1.0 - 1.0 / num_experts) ** pairs)
    enough = (tokens for tokens in TOKENS if tokens * used >= SLACK * pairs)
    return min(widest, next(enough, widest))


def early(device: torch.device) -> dict[str, Any]:
    """Options of a kernel that is set up while the one before it ends: five follow one another."""
    return {"EARLY": True, "launch_pdl": True} if launches_early(device) else {"EARLY": False}


def num_tiles(pairs: int, num_experts: int, tokens: int) -> int:
    """As many as there can be: each expert in use starts one, and the rest fill up."""
    used = min(pairs, num_experts)
    return used + (pairs - used) // tokens


class Plan(NamedTuple):
    tile_I3: Tensor
    """int32: expert (-1: none), first place and end of each tile."""
    pair_P: Tensor | None
    """int32: the pair at each place; None: itself."""
    place_TR: Tensor
    """int32: the place of each pair, -1 where it has none."""


def is_alone(pairs: int, num_experts: int) -> bool:
    return pairs <= min(FEW_PAIRS, num_experts // 4)


def plan(expert_TR: Tensor, num_experts: int, tokens: int) -> Plan:
    """Who multiplies what, on the device."""
    if is_alone(expert_TR.numel(), num_experts):
        return alone(expert_TR)
    order = permute(expert_TR, num_experts)
    return Plan(schedule(order.start_E, expert_TR.numel(), tokens), order.pair_P, order.place_TR)


def alone(expert_TR: Tensor) -> Plan:
    """A tile a pair, without an order: few tokens share few experts, and what they share is in the
    L2 when it is read again."""
    pairs = expert_TR.numel()
    tile_P3 = expert_TR.new_empty(pairs, 3, dtype=torch.int32)
    place_TR = expert_TR.new_empty(expert_TR.shape, dtype=torch.int32)
    block = triton.next_power_of_2(pairs)
    _alone[(1,)](
        expert_TR.contiguous(),
        tile_P3,
        place_TR,
        P=pairs,
        BP=block,
        num_warps=1,
        **early(expert_TR.device),
    )
    return Plan(tile_P3, None, place_TR)


@triton.jit
def _alone(expert_p, tile_p, place_p, P: tl.constexpr, BP: tl.constexpr, EARLY: tl.constexpr):
    if EARLY:
        gdc_wait()
        gdc_launch_dependents()
    p_ = tl.arange(0, BP)
    expert_P = tl.load(expert_p + p_, mask=p_ < P, other=-1).to(tl.int32)
    tl.store(tile_p + p_ * 3, expert_P, mask=p_ < P)
    tl.store(tile_p + p_ * 3 + 1, p_, mask=p_ < P)
    tl.store(tile_p + p_ * 3 + 2, p_ + 1, mask=p_ < P)
    tl.store(place_p + p_, tl.where(expert_P < 0, -1, p_), mask=p_ < P)


def schedule(start_E: Tensor, pairs: int, tokens: int) -> Tensor:
    """int32 [I, 3]: the expert of each tile (-1: none), its first place and its end."""
    num_experts = start_E.shape[0] - 1
    bound = num_tiles(pairs, num_experts, tokens)
    tile_I3 = start_E.new_empty(bound, 3)
    _schedule[(triton.cdiv(bound, BLOCK),)](
        start_E,
        tile_I3,
        bound,
        E=num_experts,
        TOKENS=tokens,
        BE=triton.next_power_of_2(num_experts),
        BI=BLOCK,
        num_warps=4,
        **early(start_E.device),
    )
    return tile_I3


@triton.jit(do_not_specialize=["bound"])
def _schedule(
    start_p,
    tile_p,
    bound,
    E: tl.constexpr,
    TOKENS: tl.constexpr,
    BE: tl.constexpr,
    BI: tl.constexpr,
    EARLY: tl.constexpr,
):
    if EARLY:
        gdc_wait()
        gdc_launch_dependents()
    i_ = tl.program_id(0) * BI + tl.arange(0, BI)
    e_ = tl.arange(0, BE)
    first_E = tl.load(start_p + e_, mask=e_ < E, other=0)
    end_E = tl.load(start_p + e_ + 1, mask=e_ < E, other=0)
    last_E = tl.cumsum((end_E - first_E + TOKENS - 1) // TOKENS, axis=0)
    before_EI = (last_E[:, None] <= i_[None, :]) & (e_ < E)[:, None]
    expert_I = tl.sum(before_EI.to(tl.int32), axis=0)
    tile_I = i_ - tl.max(tl.where(before_EI, last_E[:, None], 0), axis=0)
    used_I = expert_I < E
    first_I = tl.load(start_p + expert_I, mask=used_I, other=0) + tile_I * TOKENS
    end_I = tl.load(start_p + expert_I + 1, mask=used_I, other=0)
    here_I = i_ < bound
    tl.store(tile_p + i_ * 3, tl.where(used_I, expert_I, -1), mask=here_I)
    tl.store(tile_p + i_ * 3 + 1, first_I, mask=here_I)
    tl.store(tile_p + i_ * 3 + 2, tl.minimum(end_I, first_I + TOKENS), mask=here_I)
