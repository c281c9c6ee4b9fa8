"""Quantile balancing: the report's example, exact quantiles, a skewed router, padding."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from perilune.kernels.router.reference import route
from perilune.train.balance import BINS, QuantileBalancer, histogram_quantile
from perilune.train.loop import build_model, open_loader
from perilune.train.optim import build_optimizers
from perilune.train.override import override
from perilune.train.step import DeviceBatch, Stepper, moe_layers


def routed(balancer, logits_TE, bias_E):
    """One counted forward pass; the loads [E]."""
    routes = route(logits_TE, bias_E, balancer.num_active, True, 1.0, *(balancer() or ()))
    return torch.bincount(routes.expert_TR.flatten(), minlength=balancer.num_experts)


def exact_quantile(required_TE, num_active):
    """The ceil(T R / E)-th smallest required bias of each expert."""
    num_tokens, num_experts = required_TE.shape
    rank = -(-num_tokens * num_active // num_experts)
    return required_TE.sort(dim=0).values[rank - 1]


def test_the_example_of_the_report():
    # 8 tokens, 4 experts, 1 a token: 4, 3, 1 and 0 tokens prefer experts 0, 1, 2 and 3, with
    # margins so that two of each can be moved.
    scores = torch.tensor(
        [
            [0.90, 0.30, 0.20, 0.10],
            [0.85, 0.35, 0.22, 0.12],
            [0.60, 0.30, 0.25, 0.52],
            [0.58, 0.28, 0.24, 0.51],
            [0.30, 0.90, 0.21, 0.11],
            [0.28, 0.88, 0.23, 0.13],
            [0.29, 0.57, 0.53, 0.14],
            [0.20, 0.25, 0.80, 0.10],
        ]
    )
    logits, bias = torch.logit(scores), torch.zeros(4)
    balancer = QuantileBalancer(4, 1)
    assert routed(balancer, logits, bias).tolist() == [4, 3, 1, 0]
    assert float(balancer.update(bias)) == pytest.approx(4 / 2 - 1)
    for _ in range(10):
        loads = routed(balancer, logits, bias).tolist()
        balancer.update(bias)
    assert loads == [2, 2, 2, 2]
    assert abs(float(bias.sum())) < 1e-6


@given(st.integers(0, 10_000), st.integers(2, 9), st.integers(1, 4), st.integers(5, 200))
@settings(max_examples=40, deadline=None)
def test_histogram_is_within_a_bin_of_the_exact_quantile(seed, num_experts, active, num_tokens):
    active = min(active, num_experts - 1)
    generator = torch.Generator().manual_seed(seed)
    logits = torch.randn(num_tokens, num_experts, generator=generator)
    bias = 0.3 * torch.randn(num_experts, generator=generator)
    balancer = QuantileBalancer(num_experts, active)
    routed(balancer, logits, bias)

    score = torch.sigmoid(logits)
    alpha = (score + bias).sort(dim=1, descending=True).values[:, active]
    exact = exact_quantile((alpha[:, None] - score).double(), active)
    low, width = bias.min().double() - 1, (bias.max() - bias.min() + 2).double() / BINS
    found = low + histogram_quantile(balancer.counts_EB, active) * width
    assert (found - exact).abs().max() <= width * (1 + 1e-4)
    assert (balancer.counts_EB.sum(1) == num_tokens).all()

    balancer.update(bias)
    assert bias.double().numpy() == pytest.approx((found - found.mean()).numpy(), abs=1e-6)


def test_a_skewed_router_is_balanced_within_a_few_steps():
    generator = torch.Generator().manual_seed(3)
    skew = torch.linspace(-2, 2, 16)
    balancer, bias = QuantileBalancer(16, 4), torch.zeros(16)
    violations = []
    for _ in range(6):
        routed(balancer, torch.randn(4096, 16, generator=generator) + skew, bias)
        violations.append(float(balancer.update(bias)))
    assert violations[0] > 1
    assert max(violations[3:]) < 0.15


def test_padding_is_not_counted():
    generator = torch.Generator().manual_seed(4)
    logits = torch.randn(60, 8, generator=generator)
    alone, padded = QuantileBalancer(8, 2), QuantileBalancer(8, 2)
    bias = torch.zeros(8)
    routed(alone, logits, bias)
    padded.is_counted_T = torch.arange(100) < 60
    routed(padded, torch.cat([logits, torch.full((40, 8), 5.0)]), bias)
    assert torch.equal(alone.counts_EB, padded.counts_EB)
    assert torch.equal(alone.loads_E, padded.loads_E)


def test_evaluation_leaves_the_counts_alone():
    balancer = QuantileBalancer(4, 1).eval()
    routed(balancer, torch.randn(10, 4), torch.zeros(4))
    assert int(balancer.counts_EB.sum()) == 0
    assert int(balancer.loads_E.sum()) == 0


def test_nothing_is_balanced_where_all_experts_answer(tiny_run):
    experts = tiny_run.model["text_config"]["num_experts"]
    config = override(tiny_run, f"model.text_config.num_experts_per_token={experts}")
    model = build_model(config)
    stepper = Stepper(model, build_optimizers(model, config.optim), config.optim, 10)
    result = stepper(0, DeviceBatch.of(next(open_loader(config)), "cpu"))
    assert float(result.loss) > 0
    assert float(result.max_violation) == 0
    assert all((layer.gate.e_score_correction_bias == 0).all() for layer in moe_layers(model))


def test_micro_batches_add_up():
    logits = torch.randn(50, 6, generator=torch.Generator().manual_seed(5))
    whole, parts = QuantileBalancer(6, 2), QuantileBalancer(6, 2)
    bias_whole, bias_parts = torch.zeros(6), torch.zeros(6)
    routed(whole, logits, bias_whole)
    for part in logits.split(13):
        routed(parts, part, bias_parts)
    whole.update(bias_whole)
    parts.update(bias_parts)
    assert torch.equal(bias_whole, bias_parts)
