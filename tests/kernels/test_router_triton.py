"""Triton's choice of experts: extremes, ties, sizes, and planted faults."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from perilune.kernels.registry import spec
from perilune.kernels.router import reference
from perilune.kernels.router import triton as router
from perilune.kernels.testing import check

WEIGHING = (True, 2.446)


def drawn(*shape, seed=0, scale=1.0):
    return scale * torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def same(got, want):
    assert torch.equal(got.expert_TR, want.expert_TR)
    for a, b in zip(got[1:], want[1:], strict=True):
        torch.testing.assert_close(a, b, rtol=1e-6, atol=1e-37, equal_nan=True)


@pytest.mark.parametrize("num_active", [1, 16, 32])
def test_k3_s_experts(num_active):
    args = drawn(12, 896, scale=3.0), drawn(896, seed=1, scale=0.3), num_active, *WEIGHING
    same(router.route(*args), reference.route(*args))


def test_ties_by_the_dozen():
    logits = drawn(9, 40).mul(2).round()
    args = logits, torch.zeros(40), 16, *WEIGHING
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


@pytest.mark.parametrize("renormalize", [True, False])
@pytest.mark.parametrize("used", [(1,), (2,), (1, 2)])
def test_gradients_of_weights_and_of_scores(renormalize, used):
    logits, bias = drawn(6, 24), drawn(24, seed=1)
    grads = []
    for route in (router.route, reference.route):
        leaf = logits.clone().requires_grad_()
        outputs = route(leaf, bias, 5, renormalize, 2.446)
        loss = sum((outputs[i] * drawn(*outputs[i].shape, seed=i)).sum() for i in used)
        grads += torch.autograd.grad(loss, leaf)
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


def bias_weighs(run):
    def wrong(logits, bias, *rest):
        routes = run(logits, bias, *rest)
        return routes._replace(weight_TR=routes.weight_TR + bias[routes.expert_TR])

    return wrong


def ties_to_the_higher(run):
    def wrong(logits, bias, *rest):
        routes = run(logits.flip(1), bias.flip(0), *rest)
        expert_TR = logits.shape[1] - 1 - routes.expert_TR
        return routes._replace(expert_TR=expert_TR, score_TE=routes.score_TE.flip(1))

    return wrong


def bias_ignored(run):
    return lambda logits, bias, *rest: run(logits, 0 * bias, *rest)


def always_renormalised(run):
    return lambda logits, bias, k, _, scale: run(logits, bias, k, True, scale)


def never_renormalised_back(run):
    return lambda *x: run(*x[:4], False, *x[5:])


def scores_without_gradient(run):
    return lambda expert, score, dweight, _, *rest: run(expert, score, dweight, None, *rest)


FAULTS = {
    "bias weighs": ("forward", bias_weighs, "eight_three"),
    "bias ignored": ("forward", bias_ignored, "eight_three"),
    "ties to the higher": ("forward", ties_to_the_higher, "all_tied"),
    "always renormalised": ("forward", always_renormalised, "not_renormalised"),
    "never renormalised": ("backward", never_renormalised_back, "eight_three"),
    "scores forgotten": ("backward", scores_without_gradient, "eight_three"),
}


@pytest.mark.parametrize("name", FAULTS)
def test_a_fault_is_found(name, monkeypatch):
    attr, wrong, case = FAULTS[name]
    declared = spec("router")
    one = replace(declared, cases={case: declared.cases[case]})
    assert all(r.passed for r in check(one, backend="cuda", tier="cpu"))
    monkeypatch.setattr(router, attr, wrong(getattr(router, attr)))
    assert not all(r.passed for r in check(one, backend="cuda", tier="cpu"))
