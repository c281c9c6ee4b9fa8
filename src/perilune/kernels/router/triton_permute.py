"""Pairs grouped by expert on a GPU, without a sort: a token names an expert once at most.

Legend: T tokens, R experts a token, E experts, P pairs of a program, W words of 32 tokens.

Which of 32 tokens go to an expert are the bits of a word. A pair's rank among the pairs of its
expert is the number of bits below its token's; ranks and the experts' loads make the places. Few
tokens are one launch, in which every program serves some of the experts. More are cut into blocks:
one launch ranks each block by itself, and another adds the loads of the blocks before.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from perilune.kernels.common.triton_math import uses_ptx
from perilune.kernels.router.permutation import Permutation

WORD: tl.constexpr = tl.constexpr(32)
FEW_WORDS = 8
"""Up to here one launch serves all tokens."""
BLOCK_WORDS = (4, 8)
MOST_BLOCKS = 128
"""From here on larger ones: every block reads the loads of all."""
AT_ONCE: tl.constexpr = tl.constexpr(16)
"""Blocks whose loads are read together."""


def permute(expert_TR: Tensor, num_experts: int) -> Permutation:
    """Of contiguous indices."""
    t, r = expert_TR.shape
    found = Permutation(
        *(
            expert_TR.new_empty(shape, dtype=torch.int32)
            for shape in ((num_experts + 1,), (t * r,), (t, r))
        )
    )
    num_words = triton.cdiv(t, WORD.value)
    if num_words <= FEW_WORDS:
        _permute_at_once(expert_TR, num_experts, found, triton.next_power_of_2(max(1, num_words)))
    else:
        small, large = BLOCK_WORDS
        _permute_blocks(
            expert_TR, num_experts, found, small if num_words <= small * MOST_BLOCKS else large
        )
    return found


def _permute_at_once(expert_TR: Tensor, e: int, found: Permutation, words: int) -> None:
    """As many programs as words, so that each has as many pairs to place as a word has."""
    experts = triton.cdiv(e, words)
    bits_GEW = expert_TR.new_empty(words, experts, words, dtype=torch.int32)
    _place_few[(words,)](
        expert_TR,
        bits_GEW,
        *found,
        expert_TR.numel(),
        E=e,
        EG=experts,
        BE=triton.next_power_of_2(experts),
        PTX=uses_ptx(expert_TR.device),
        **_sizes(expert_TR, words),
    )


def _permute_blocks(expert_TR: Tensor, e: int, found: Permutation, words: int) -> None:
    sizes = _sizes(expert_TR, words) | {"E": e, "BE": triton.next_power_of_2(e)}
    p = expert_TR.numel()
    blocks = triton.cdiv(expert_TR.shape[0], words * WORD.value)
    bits_BEW = expert_TR.new_empty(blocks, e, words, dtype=torch.int32)
    load_BE = expert_TR.new_empty(blocks, e, dtype=torch.int16)
    ptx = uses_ptx(expert_TR.device)
    _rank[(blocks,)](expert_TR, bits_BEW, load_BE, found.place_TR, p, PTX=ptx, **sizes)
    _place[(blocks,)](expert_TR, load_BE, *found, p, blocks, **sizes)


def _sizes(expert_TR: Tensor, words: int) -> dict[str, int]:
    r = expert_TR.shape[1]
    pairs = triton.next_power_of_2(words * WORD.value * r)
    return {"R": r, "W": words, "BP": pairs, "num_warps": min(32, max(4, pairs // 64))}


@triton.jit
def bits_set(x, PTX: tl.constexpr):
    """How many, in each int32."""
    if PTX:
        return tl.inline_asm_elementwise(
            "popc.b32 $0, $1;", "=r,r", [x], dtype=tl.int32, is_pure=True, pack=1
        )
    else:
        x = x.to(tl.uint32, bitcast=True)
        x = x - ((x >> 1) & 0x55555555)
        x = (x & 0x33333333) + ((x >> 2) & 0x33333333)
        x = (x + (x >> 4)) & 0x0F0F0F0F
        return ((x * 0x01010101) >> 24).to(tl.int32, bitcast=True)


@triton.jit
def mark(bits_p, e_P, t_P, is_marked_P, E: tl.constexpr, BE: tl.constexpr, W: tl.constexpr):
    """Words [BE, W] with the bits of pairs. What other threads have written stands in the L2, where
    their atomics are."""
    e_ = tl.arange(0, BE)[:, None]
    at_EW = bits_p + e_ * W + tl.arange(0, W)[None, :]
    tl.store(at_EW, tl.zeros([BE, W], tl.int32), mask=e_ < E)
    tl.debug_barrier()
    bit_P = tl.full(t_P.shape, 1, tl.int32) << (t_P % WORD)
    tl.atomic_or(bits_p + e_P * W + t_P // WORD, bit_P, mask=is_marked_P, sem="relaxed")
    tl.debug_barrier()
    return tl.load(at_EW, mask=e_ < E, other=0, cache_modifier=".cg")


@triton.jit
def rank(word_EW, first_EW, e_P, t_P, PTX: tl.constexpr, BE: tl.constexpr, W: tl.constexpr):
    """How many pairs of its expert come before a pair, from `first` of its word on."""
    at_P = e_P * W + t_P // WORD
    word_P = tl.gather(tl.reshape(word_EW, [BE * W]), at_P, 0)
    below_P = (tl.full(t_P.shape, 1, tl.int32) << (t_P % WORD)) - 1
    first_P = tl.gather(tl.reshape(first_EW, [BE * W]), at_P, 0)
    return first_P + bits_set(word_P & below_P, PTX)


@triton.jit
def _place_few(
    expert_p,
    bits_p,
    start_p,
    pair_p,
    place_p,
    num_pairs,
    E: tl.constexpr,
    EG: tl.constexpr,
    R: tl.constexpr,
    W: tl.constexpr,
    BP: tl.constexpr,
    BE: tl.constexpr,
    PTX: tl.constexpr,
):
    program = tl.program_id(0)
    p_ = tl.arange(0, BP)
    t_ = p_ // R
    expert_P = tl.load(expert_p + p_, mask=p_ < num_pairs, other=-1).to(tl.int32)
    e_P = expert_P - program * EG
    is_mine_P = (expert_P >= 0) & (e_P >= 0) & (e_P < EG)
    e_P = tl.where(is_mine_P, e_P, 0)
    word_EW = mark(bits_p + program * EG * W, e_P, t_, is_mine_P, EG, BE, W)
    load_EW = bits_set(word_EW, PTX)
    load_E = tl.sum(load_EW, axis=1)
    lower = tl.sum(((expert_P >= 0) & (expert_P < program * EG)).to(tl.int32), axis=0)
    start_E = lower + tl.cumsum(load_E, axis=0) - load_E
    first_EW = start_E[:, None] + tl.cumsum(load_EW, axis=1) - load_EW
    place_P = rank(word_EW, first_EW, e_P, t_, PTX, BE, W)
    tl.store(place_p + p_, place_P, mask=is_mine_P)
    tl.store(pair_p + place_P, p_, mask=is_mine_P)
    e_ = tl.arange(0, BE)
    is_mine_E = (e_ < EG) & (program * EG + e_ < E)
    tl.store(start_p + program * EG + e_, start_E, mask=is_mine_E)
    if program == 0:
        placed = tl.sum((expert_P >= 0).to(tl.int32), axis=0)
        tl.store(start_p + E, placed)
        mark_nobodys(place_p, pair_p, p_, expert_P, placed, num_pairs)


@triton.jit
def mark_nobodys(place_p, pair_p, p_P, expert_P, placed, num_pairs):
    """-1 for pairs without an expert, and for the places that are left over at the end."""
    none_P = tl.full(p_P.shape, -1, tl.int32)
    tl.store(place_p + p_P, none_P, mask=(expert_P < 0) & (p_P < num_pairs))
    tl.store(pair_p + p_P, none_P, mask=(p_P >= placed) & (p_P < num_pairs))


@triton.jit
def block_of_pairs(expert_p, num_pairs, R: tl.constexpr, W: tl.constexpr, BP: tl.constexpr):
    """(pairs, their tokens in this block, their experts): -1 where there is none."""
    i_ = tl.arange(0, BP)
    p_ = tl.program_id(0) * (W * WORD * R) + i_
    # Whatever is behind this block is as good as behind the end.
    p_ = tl.where(i_ < W * WORD * R, p_, num_pairs)
    expert_P = tl.load(expert_p + p_, mask=p_ < num_pairs, other=-1).to(tl.int32)
    return p_, i_ // R, expert_P


@triton.jit
def _rank(
    expert_p,
    bits_p,
    load_p,
    place_p,
    num_pairs,
    E: tl.constexpr,
    R: tl.constexpr,
    W: tl.constexpr,
    BP: tl.constexpr,
    BE: tl.constexpr,
    PTX: tl.constexpr,
):
    block = tl.program_id(0)
    p_, t_, expert_P = block_of_pairs(expert_p, num_pairs, R, W, BP)
    e_P = tl.maximum(expert_P, 0)
    word_EW = mark(bits_p + block * E * W, e_P, t_, expert_P >= 0, E, BE, W)
    load_EW = bits_set(word_EW, PTX)
    first_EW = tl.cumsum(load_EW, axis=1) - load_EW
    tl.store(place_p + p_, rank(word_EW, first_EW, e_P, t_, PTX, BE, W), mask=p_ < num_pairs)
    e_ = tl.arange(0, BE)
    tl.store(load_p + block * E + e_, tl.sum(load_EW, axis=1).to(tl.int16), mask=e_ < E)


@triton.jit
def _place(
    expert_p,
    load_p,
    start_p,
    pair_p,
    place_p,
    num_pairs,
    num_blocks,
    E: tl.constexpr,
    R: tl.constexpr,
    W: tl.constexpr,
    BP: tl.constexpr,
    BE: tl.constexpr,
):
    block = tl.program_id(0)
    p_, _, expert_P = block_of_pairs(expert_p, num_pairs, R, W, BP)
    rank_P = tl.load(place_p + p_, mask=p_ < num_pairs, other=0)
    e_ = tl.arange(0, BE)
    load_BE = tl.zeros([AT_ONCE, BE], tl.int32)
    before_BE = tl.zeros([AT_ONCE, BE], tl.int32)
    for first in range(0, num_blocks, AT_ONCE):
        b_ = first + tl.arange(0, AT_ONCE)[:, None]
        here_BE = (b_ < num_blocks) & (e_ < E)[None, :]
        more_BE = tl.load(load_p + b_ * E + e_[None, :], mask=here_BE, other=0).to(tl.int32)
        load_BE += more_BE
        before_BE += tl.where(b_ < block, more_BE, 0)
    load_E = tl.sum(load_BE, axis=0)
    before_E = tl.sum(before_BE, axis=0)
    start_E = tl.cumsum(load_E, axis=0) - load_E
    first_P = tl.gather(start_E + before_E, tl.maximum(expert_P, 0), 0)
    place_P = first_P + rank_P
    tl.store(place_p + p_, place_P, mask=expert_P >= 0)
    tl.store(pair_p + place_P, p_, mask=expert_P >= 0)
    placed = tl.sum(load_E, axis=0)
    mark_nobodys(place_p, pair_p, p_, expert_P, placed, num_pairs)
    if block == 0:
        tl.store(start_p + e_, start_E, mask=e_ < E)
        tl.store(start_p + E, placed)
