"""Quantile balancing: the report's example, exact quantiles, a skewed router."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from perilune.kernels.router.reference import route
from perilune.kernels.router.tally import Tally, grid
from perilune.train.balance.oracle import exact_bias, exact_quantile
from perilune.train.balance.quantile import histogram_quantile, quantile_bias

BINS = 1000


def counted(logits_TE, bias_E, num_active, bins=BINS):
    """Histograms and loads of one choice."""
    experts = logits_TE.shape[1]
    tally = Tally(
        torch.zeros(experts, bins, dtype=torch.int32), torch.zeros(experts, dtype=torch.int32)
    )
    route(logits_TE, bias_E, num_active, True, 1.0, *tally)
    return tally


def test_the_example_of_the_report():
    """8 tokens, 4 experts, 1 a token: 4, 3, 1 and 0 tokens prefer the experts; the bias moves two
    from the first to the last, and one from the second to the third."""
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
    loads = []
    for _ in range(10):
        tally = counted(logits, bias, 1)
        loads.append(tally.load_E.tolist())
        bias = quantile_bias(tally.count_EB, bias, 1)
    assert loads[0] == [4, 3, 1, 0]
    assert loads[-1] == [2, 2, 2, 2]
    assert abs(float(bias.sum())) < 1e-6


SKEWS = {
    "normal": lambda g, t, e: torch.randn(t, e, generator=g),
    "experts_apart": lambda g, t, e: torch.randn(t, e, generator=g) + torch.linspace(-6, 3, e),
    "saturated": lambda g, t, e: 30 * torch.randn(t, e, generator=g),
    "two_kinds_of_tokens": lambda g, t, e: (
        torch.randn(t, e, generator=g)
        + 5 * torch.randint(2, (t, 1), generator=g) * torch.linspace(-1, 1, e)
    ),
    "all_equal": lambda g, t, e: torch.zeros(t, e),
}


@given(
    seed=st.integers(0, 10_000),
    num_experts=st.sampled_from([2, 3, 7, 16, 64, 256, 896]),
    active=st.integers(1, 16),
    num_tokens=st.integers(1, 60),
    skew=st.sampled_from(sorted(SKEWS)),
    bins=st.sampled_from([10, 997, BINS]),
    spread=st.sampled_from([0.0, 0.3, 3.0]),
)
@settings(max_examples=60, deadline=None)
def test_histogram_is_within_a_bin_of_the_exact_quantile(
    seed, num_experts, active, num_tokens, skew, bins, spread
):
    active = min(active, num_experts - 1)
    generator = torch.Generator().manual_seed(seed)
    logits = SKEWS[skew](generator, num_tokens, num_experts)
    bias = spread * torch.randn(num_experts, generator=generator)
    count_EB = counted(logits, bias, active, bins).count_EB
    assert (count_EB.sum(1) == num_tokens).all()

    exact = exact_quantile(torch.sigmoid(logits), bias, active)
    low, width = grid(bias.double(), bins)
    found = low + histogram_quantile(count_EB, active) * width
    # A score in fp32 may fall into the neighbouring bin.
    assert (found - exact).abs().max() <= width * (1 + 1e-3) + 1e-6

    centred = exact_bias(torch.sigmoid(logits), bias, active)
    assert (quantile_bias(count_EB, bias, active) - centred).abs().max() <= 2 * width + 1e-5


def test_layers_together_are_layers_alone():
    generator = torch.Generator().manual_seed(1)
    biases = [spread * torch.randn(12, generator=generator) for spread in (0.0, 0.3, 2.0)]
    tallies = [counted(torch.randn(50, 12, generator=generator), bias, 3) for bias in biases]
    together = quantile_bias(
        torch.stack([tally.count_EB for tally in tallies]), torch.stack(biases), 3
    )
    alone = [quantile_bias(t.count_EB, bias, 3) for t, bias in zip(tallies, biases, strict=True)]
    assert torch.equal(together, torch.stack(alone))


def test_a_layer_that_counted_nothing_keeps_its_bias():
    bias_LE = torch.tensor([[0.5, -0.5, 0.0], [0.5, -0.5, 0.0]])
    count_LEB = torch.zeros(2, 3, 20, dtype=torch.int32)
    count_LEB[1] = counted(torch.randn(9, 3), bias_LE[1], 1, bins=20).count_EB
    found = quantile_bias(count_LEB, bias_LE, 1)
    assert torch.equal(found[0], bias_LE[0])
    assert not torch.equal(found[1], bias_LE[1])


@pytest.mark.parametrize(("num_experts", "num_active", "below"), [(16, 4, 0.15), (64, 4, 0.4)])
def test_a_skewed_router_is_balanced_within_a_few_steps(num_experts, num_active, below):
    """Of fresh tokens in every step; what is left is what 4,096 draws leave."""
    generator = torch.Generator().manual_seed(3)
    skew, bias = torch.linspace(-2, 2, num_experts), torch.zeros(num_experts)
    violations = []
    for _ in range(7):
        tally = counted(
            torch.randn(4096, num_experts, generator=generator) + skew, bias, num_active
        )
        violations.append(float(tally.load_E.max() / tally.load_E.double().mean() - 1))
        bias = quantile_bias(tally.count_EB, bias, num_active)
    assert violations[0] > 1
    assert max(violations[4:]) < below


@pytest.mark.parametrize(
    ("row", "found"),
    [
        ([0, 4, 4, 0], 1 + 2 / 4),
        ([1, 4, 3, 0], 1 + 1 / 4),
        ([2, 6, 0, 0], 1.0),
        ([8, 0, 0, 0], 2 / 8),
        ([0, 0, 0, 8], 3 + 2 / 8),
        ([1, 5, 0, 0], 1 + 0.5 / 5),  # a share of one and a half: reached with the second token
    ],
)
def test_a_quantile_lies_inside_its_bin_as_far_as_its_share_is_reached_there(row, found):
    count_EB = torch.tensor([row] * 4, dtype=torch.int32)
    assert histogram_quantile(count_EB, 1).tolist() == pytest.approx([found] * 4)
