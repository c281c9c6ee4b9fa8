"""The grouped form of the experts (a GPU's), run on the CPU: its layout and its values."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from perilune.kernels.experts import grouped, oracle, reference, triton_grouped
from perilune.kernels.testing.memory import NewMemory


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_every_choice_has_a_row_of_its_own_in_its_expert_s_group(data):
    num_experts = data.draw(st.integers(1, 9))
    t = data.draw(st.integers(1, 20))
    r = data.draw(st.integers(1, num_experts))
    choice = st.permutations(range(num_experts)).map(lambda order: order[:r])
    expert_TR = torch.tensor(data.draw(st.lists(choice, min_size=t, max_size=t)))
    slot_TR, _, ends_E, rows = grouped.groups_of(expert_TR, num_experts)

    slots = slot_TR.flatten().tolist()
    assert len(set(slots)) == t * r
    assert ends_E.dtype == torch.int32
    ends = ends_E.tolist()
    starts = [0, *ends[:-1]]
    for slot, expert in zip(slots, expert_TR.flatten().tolist(), strict=True):
        assert starts[expert] <= slot < ends[expert]
    for start, end, expert in zip(starts, ends, range(num_experts), strict=True):
        used = int((expert_TR == expert).sum())
        assert end - start == -(-used // grouped.ALIGN) * grouped.ALIGN
    assert ends[-1] <= rows <= t * r + num_experts * grouped.ALIGN


@pytest.mark.parametrize("only", [8, 2], ids=["spread", "two_experts_take_all"])
def test_values_and_gradients_equal_the_reference_in_bf16(only):
    generator = torch.Generator().manual_seed(2)
    t, r, num_experts, width, inner = 13, 2, 8, 16, 24

    def draw(*shape: int) -> torch.Tensor:
        rounded = torch.randn(shape, generator=generator).bfloat16().float()
        return rounded.requires_grad_()

    x, weight = draw(t, width), draw(t, r)
    w13, w2 = draw(num_experts, 2 * inner, width), draw(num_experts, width, inner)
    chosen = torch.rand(t, only, generator=generator).argsort(1)[:, :r]
    out, grads = [], []
    for run in (reference.experts, grouped.experts):
        y = run(x, chosen, weight, w13, w2, 4.0, 25.0)
        out.append(y.detach())
        grads.append(torch.autograd.grad(y.square().sum(), (x, weight, w13, w2)))
    assert out[0].dtype == out[1].dtype
    # Two roundings to bf16 a branch (hidden and output), 2^-8 each.
    assert (out[1] - out[0]).norm() < 1e-2 * out[0].norm()
    for got, want in zip(grads[1], grads[0], strict=True):
        assert (got - want).norm() < 2e-2 * want.norm()


@pytest.mark.parametrize(
    ("form", "elsewhere"),
    [(grouped, False), (triton_grouped, False), (triton_grouped, True)],
    ids=["torch", "triton", "triton_elsewhere"],
)
@pytest.mark.parametrize("only", [8, 2], ids=["spread", "two_experts_take_all"])
def test_bf16_throughout_against_fp64(only, form, elsewhere):
    generator = torch.Generator().manual_seed(3)
    t, r, num_experts, width, inner = 21, 2, 8, 40, 24

    def draw(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator).bfloat16()

    # A slice of a wider projection, and weights that are a router's in fp32.
    x, weight = draw(t, 2 * width)[:, :width], draw(t, r).float()
    w13, w2 = draw(num_experts, 2 * inner, width), draw(num_experts, width, inner)
    chosen = torch.rand(t, only, generator=generator).argsort(1)[:, :r]
    if elsewhere:
        chosen[chosen == 1], chosen[5] = -1, -1
    dy = draw(t, width)
    results = []
    for run, dtype in ((oracle.experts, torch.float64), (form.experts, None)):
        leaves = [y.to(dtype or y.dtype).detach().requires_grad_() for y in (x, weight, w13, w2)]
        y = run(leaves[0], chosen, *leaves[1:], 4.0, 25.0)
        results.append([y, *torch.autograd.grad(y, leaves, dy.to(y.dtype))])
    for want, got, like in zip(*results, (x, x, weight, w13, w2), strict=True):
        assert got.dtype == like.dtype
        assert (got - want).norm() < 2e-2 * want.norm()


def test_rows_of_padding_are_zeros_whatever_was_there():
    expert_TR = torch.tensor([[0, 2], [0, 3], [2, 0]])
    groups = grouped.groups_of(expert_TR, 5)
    x, weight = torch.randn(3, 12).bfloat16(), torch.randn(3, 2)
    memory = NewMemory(poisoned=True)
    ends = groups.start_E, groups.end_E
    with memory:
        rows = triton_grouped.spread(x, groups.slot_TR, *ends, groups.rows, grouped.ALIGN)
        graded, _ = triton_grouped.spread_weighted(
            x, groups.slot_TR, *ends, weight, rows, grouped.ALIGN
        )
    assert not memory.overrun()
    used = torch.zeros(groups.rows, dtype=torch.bool).index_fill(0, groups.slot_TR.flatten(), True)
    in_groups = torch.arange(groups.rows) < groups.end_E[-1]
    for moved in (rows, graded):
        assert not moved[in_groups & ~used].any()
        assert moved[used].isfinite().all()
    assert torch.equal(rows[groups.slot_TR], x[:, None].expand(3, 2, 12))
