"""Triton's choice of experts: extremes, ties, sizes, counters, and planted faults."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from perilune.kernels.registry import spec
from perilune.kernels.router import reference
from perilune.kernels.router import triton as router
from perilune.kernels.router.tally import Tally
from perilune.kernels.testing import check

WEIGHING = (True, 2.446)


def drawn(*shape, seed=0, scale=1.0):
    return scale * torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def same(got, want):
    assert torch.equal(got.expert_TR, want.expert_TR)
    torch.testing.assert_close(got.weight_TR, want.weight_TR, rtol=1e-6, atol=1e-37, equal_nan=True)


@pytest.mark.parametrize("num_active", [1, 16, 32])
def test_k3_s_experts(num_active):
    args = drawn(5, 896, scale=3.0), drawn(896, seed=1, scale=0.3), num_active, *WEIGHING
    same(router.route(*args), reference.route(*args))


@pytest.mark.parametrize("experts", [1, 33, 129, 513, 1000, 1024])
def test_numbers_of_experts(experts):
    args = drawn(2, experts), drawn(experts, seed=1, scale=0.3), min(experts, 7), *WEIGHING
    same(router.route(*args), reference.route(*args))


def test_the_best_are_neighbours():
    """All of a token's experts come from one lane's group."""
    logits = drawn(3, 896)
    for token, group in enumerate((0, 17, 31)):
        logits[token].view(7, 32, 4)[:, group] += 9
    args = logits, torch.zeros(896), 28, *WEIGHING
    same(router.route(*args), reference.route(*args))


@pytest.mark.parametrize("experts", [40, 896])
def test_ties_by_the_dozen(experts):
    logits = drawn(4, experts).mul(2).round()
    logits[0] = 0.25
    args = logits, torch.zeros(experts), 16, *WEIGHING
    same(router.route(*args), reference.route(*args))


# The interpreter's exponential warns where it becomes infinite.
@pytest.mark.filterwarnings("ignore::RuntimeWarning")
def test_logits_beyond_the_exponential_and_no_numbers():
    inf, nan = torch.inf, torch.nan
    logits = torch.tensor([[-inf, -200.0, -100.0, -80.0, 0.0, 17.0, 100.0, inf, nan, nan]])
    for bias in (torch.zeros(10), drawn(10)):
        args = logits, bias, 10, False, 1.0
        same(router.route(*args), reference.route(*args))


def test_a_bias_keeps_its_digits():
    """1e-3 apart around 8, which bf16 would make one."""
    bias = 8.0 + 1e-3 * drawn(64, seed=2).argsort().float()
    args = torch.zeros(2, 64), bias, 8, *WEIGHING
    same(router.route(*args), reference.route(*args))


def test_logits_keep_their_digits():
    """1e-4 apart around 2, which bf16 would make a few; and what it would choose is another set."""
    logits = 2.0 + 1e-4 * torch.stack([drawn(896, seed=s).argsort().float() for s in range(2)])
    bias = torch.zeros(896)
    routes = router.route(logits, bias, 16, *WEIGHING)
    same(routes, reference.route(logits, bias, 16, *WEIGHING))
    rounded = router.route(logits.bfloat16().float(), bias, 16, *WEIGHING)
    assert not torch.equal(rounded.expert_TR, routes.expert_TR)


@pytest.mark.parametrize("renormalize", [True, False])
def test_gradients(renormalize):
    logits, bias = drawn(6, 24), drawn(24, seed=1)
    grads = []
    for route in (router.route, reference.route):
        leaf = logits.clone().requires_grad_()
        weight_TR = route(leaf, bias, 5, renormalize, 2.446).weight_TR
        grads += torch.autograd.grad((weight_TR * drawn(6, 5, seed=3)).sum(), leaf)
    torch.testing.assert_close(*grads, rtol=1e-5, atol=1e-6)


def test_no_token_and_what_the_reference_serves():
    leaf = drawn(0, 8).requires_grad_()
    routes = router.route(leaf, torch.zeros(8), 3, *WEIGHING)
    assert routes.expert_TR.shape == (0, 3)
    routes.weight_TR.sum().backward()
    assert leaf.grad.shape == (0, 8)
    for e, r in ((1025, 2), (64, 33)):
        args = drawn(2, e), torch.zeros(e), r, *WEIGHING
        assert all(map(torch.equal, router.route(*args), reference.route(*args)))


def counted(route, logits, bias, num_active, counted_T=None):
    experts = logits.shape[1]
    tally = Tally(torch.zeros(experts, 1000, dtype=torch.int32), torch.zeros(experts).int())
    for _ in range(2):
        route(logits, bias, num_active, *WEIGHING, *tally._replace(is_counted_T=counted_T))
    return tally


def test_counters_of_balancing():
    logits, bias = drawn(6, 200), drawn(200, seed=1, scale=0.3)
    some = torch.tensor([True, False, True, True, False, True])
    for counted_T, tokens in ((None, 6), (some, 4)):
        got, want = (
            counted(route, logits, bias, 16, counted_T) for route in (router.route, reference.route)
        )
        assert torch.equal(got.load_E, want.load_E)
        assert (got.count_EB.sum(1) == 2 * tokens).all()
        # A rounding may move a few to the next bin.
        moved = (got.count_EB - want.count_EB).cumsum(1).abs().sum()
        assert moved <= 1e-3 * got.count_EB.sum()


def test_counters_of_a_graph_that_is_compiled():
    def step(logits, bias, count, load):
        return router.route(logits, bias, 3, *WEIGHING, count, load).weight_TR.square().sum()

    logits, bias = drawn(4, 12).requires_grad_(), drawn(12, seed=1)
    results = []
    compiled = torch.compile(step, fullgraph=True, dynamic=False, backend="aot_eager")
    for run in (compiled, step):
        count, load = torch.zeros(12, 50, dtype=torch.int32), torch.zeros(12, dtype=torch.int32)
        (grad,) = torch.autograd.grad(run(logits, bias, count, load), logits)
        results.append((grad, count, load))
    torch.compiler.reset()
    assert all(map(torch.equal, *results))
    assert results[0][2].sum() == 12


def bias_weighs(run):
    def wrong(logits, bias, *rest):
        routes = run(logits, bias, *rest)
        return routes._replace(weight_TR=routes.weight_TR + bias[routes.expert_TR])

    return wrong


def ties_to_the_higher(run):
    def wrong(logits, bias, *rest):
        routes = run(logits.flip(1), bias.flip(0), *rest)
        return routes._replace(expert_TR=logits.shape[1] - 1 - routes.expert_TR)

    return wrong


def bias_ignored(run):
    return lambda logits, bias, *rest: run(logits, 0 * bias, *rest)


def always_renormalised(run):
    return lambda logits, bias, k, _, *rest: run(logits, bias, k, True, *rest)


def never_renormalised_back(run):
    return lambda *x: run(*x[:3], False, *x[4:])


def padding_counted(run):
    def wrong(*x):
        return run(*x[:5], x[5] and x[5]._replace(is_counted_T=None))

    return wrong


FAULTS = {
    "bias weighs": ("forward", bias_weighs, "eight_three"),
    "bias ignored": ("forward", bias_ignored, "eight_three"),
    "ties to the higher": ("forward", ties_to_the_higher, "all_tied"),
    "always renormalised": ("forward", always_renormalised, "not_renormalised"),
    "never renormalised": ("backward", never_renormalised_back, "eight_three"),
    "padding counted": ("forward", padding_counted, "tallied"),
}


@pytest.mark.parametrize("name", FAULTS)
def test_a_fault_is_found(name, monkeypatch):
    attr, wrong, case = FAULTS[name]
    monkeypatch.setattr(router, attr, wrong(getattr(router, attr)))
    assert red(case)


def red(case):
    declared = spec("router")
    one = replace(declared, cases={case: declared.cases[case]})
    return [r.what for r in check(one, backend="cuda", tier="cpu") if not r.passed]
