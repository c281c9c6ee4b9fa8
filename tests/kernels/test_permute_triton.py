"""Triton's permutation: sizes about its words and blocks, loads of one expert, launches."""

from __future__ import annotations

import pytest
import torch

from perilune.kernels.router import permutation, triton_permute
from perilune.kernels.router import triton as router


def pairs(tokens, experts, active, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return torch.rand(tokens, experts, generator=generator).argsort(1)[:, :active]


def same(expert_TR, experts):
    got, want = (p.permute(expert_TR, experts) for p in (router, permutation))
    for a, b in zip(got, want, strict=True):
        assert a.dtype == b.dtype == torch.int32
        assert torch.equal(a, b)


@pytest.mark.parametrize("tokens", [0, 1, 31, 32, 33, 65, 256, 257, 384])
def test_numbers_of_tokens(tokens):
    same(pairs(tokens, 20, 3), 20)


def test_k3_s_experts():
    same(pairs(40, 896, 16), 896)
    same(pairs(260, 896, 16), 896)


def test_every_token_to_one_expert():
    for tokens in (70, 300):
        same(torch.full((tokens, 1), 4), 7)


def test_nobody_s_pairs():
    for tokens in (40, 290):
        expert_TR = pairs(tokens, 12, 4)
        expert_TR[expert_TR >= 5] = -1
        same(expert_TR, 5)
    same(torch.full((33, 2), -1), 3)


def test_more_experts_than_a_program_holds_are_the_reference_s():
    same(pairs(5, 1500, 4), 1500)


def test_the_inverse_and_order_hold():
    expert_TR = pairs(300, 30, 5)
    start_E, pair_P, place_TR = router.permute(expert_TR, 30)
    assert torch.equal(pair_P[place_TR.flatten()], torch.arange(1500, dtype=torch.int32))
    for e in range(30):
        of_e = pair_P[start_E[e] : start_E[e + 1]]
        assert (expert_TR.flatten()[of_e] == e).all()
        assert (of_e.diff() > 0).all()


def test_large_blocks_where_there_would_be_too_many(monkeypatch):
    monkeypatch.setattr(triton_permute, "MOST_BLOCKS", 2)
    same(pairs(600, 10, 2), 10)


def test_inside_of_a_compiled_graph():
    def step(expert_TR):
        start_E, pair_P, place_TR = router.permute(expert_TR, 20)
        return start_E + 0, pair_P + 0, place_TR + 0

    expert_TR = pairs(50, 20, 3)
    compiled = torch.compile(step, fullgraph=True, dynamic=False, backend="aot_eager")
    got = compiled(expert_TR)
    torch.compiler.reset()
    assert all(map(torch.equal, got, permutation.permute(expert_TR, 20)))
