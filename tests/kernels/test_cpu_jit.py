"""The compiled loops: their scalar functions, and that a token's result is its own."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import Tensor

from perilune.kernels.attn_res.cpu import attn_res
from perilune.kernels.common.cpu_jit import exp, jit, sigmoid, tanh
from perilune.kernels.common.few_tokens import MAX_TOKENS, few_tokens
from perilune.kernels.experts.cpu import experts
from perilune.kernels.kda_step.cpu import kda_step
from perilune.kernels.linear.cpu import linear, scores
from perilune.kernels.norm.cpu import gated_rms_norm, rms_norm
from perilune.kernels.router.cpu import route
from perilune.kernels.situ.cpu import situ_glu


@jit
def _each(x, e, s, t):
    for i in range(x.shape[0]):
        e[i], s[i], t[i] = exp(x[i]), sigmoid(x[i]), tanh(x[i])


def scalars(x: np.ndarray) -> list[np.ndarray]:
    outputs = [np.empty_like(x) for _ in range(3)]
    _each(x, *outputs)
    return outputs


def test_scalar_functions_are_exact_to_three_units_in_the_last_place():
    near_zero = np.geomspace(1e-20, 1, 2001)
    x = np.concatenate([np.linspace(-86, 86, 20001), near_zero, -near_zero]).astype(np.float32)
    wide = x.astype(np.float64)
    truths = np.exp(wide), 1 / (1 + np.exp(-wide)), np.tanh(wide)
    for got, want in zip(scalars(x), truths, strict=True):
        assert np.all(np.abs(got - want) <= 3 * 2.0**-23 * np.abs(want))


def test_scalar_functions_saturate_and_let_nan_through():
    e, s, t = scalars(np.array([-np.inf, -1e30, 1e30, np.inf, np.nan], np.float32))
    assert np.all(e[:2] < 1e-37)
    assert np.all(e[2:4] > 1e37)
    np.testing.assert_allclose(s[:4], [0, 0, 1, 1], atol=1e-37)
    np.testing.assert_array_equal(t[:4], [-1, -1, 1, 1])
    assert np.isnan([e[4], s[4], t[4]]).all()


def test_loops_serve_few_fp32_tokens_without_gradient():
    x = torch.zeros(MAX_TOKENS, 3)
    assert not few_tokens(x)
    with torch.no_grad():
        assert few_tokens(x)
        assert not few_tokens(torch.zeros(MAX_TOKENS + 1, 3))
        assert not few_tokens(x.double())
        assert not few_tokens(x.bfloat16())


def draw(*shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape)))


T, D, E, INNER, H, K = 5, 40, 6, 24, 2, 16
W13, W2 = draw(E, 2 * INNER, D).bfloat16(), draw(E, D, INNER).bfloat16()
CHOSEN = torch.arange(T * 2).view(T, 2) % E
ROWS = {
    "linear": lambda rows: linear(draw(T, D)[rows], draw(33, D).bfloat16()),
    "scores": lambda rows: scores(draw(T, D)[rows].bfloat16(), draw(33, D).bfloat16()),
    "rms_norm": lambda rows: rms_norm(draw(T, D)[rows], draw(D), 1e-5),
    "gated_rms_norm": lambda rows: gated_rms_norm(
        draw(T, H, D)[rows], draw(T, H, D)[rows], draw(D), 1e-5
    ),
    "attn_res": lambda rows: (
        attn_res(draw(T, D)[rows], draw(3, T, D)[:, rows], draw(D), 1e-5, weight_D=draw(D)).h_TD
    ),
    "situ": lambda rows: situ_glu(draw(T, D)[rows], 4.0, 25.0),
    "router": lambda rows: route(draw(T, E)[rows], draw(E), 2, True, 2.0).weight_TR,
    "experts": lambda rows: experts(
        draw(T, D)[rows], CHOSEN[rows], draw(T, 2)[rows], W13, W2, 4.0, 25.0
    ),
    "kda_step": lambda rows: kda_step(
        draw(T, 3 * H * K)[rows],
        draw(T, H, K)[rows],
        draw(T, H)[rows],
        draw(T, H, K)[rows] + 1,
        draw(3 * H * K, 4),
        draw(H),
        draw(H, K),
        draw(K),
        draw(T, 3, 3 * H * K)[rows].contiguous(),
        draw(T, H, K, K)[rows].contiguous(),
        torch.arange(T)[rows] - torch.arange(T)[rows].min(),
        -5.0,
        1e-5,
    ),
}


@pytest.mark.parametrize("op", ROWS)
def test_a_token_s_result_is_bitwise_the_same_alone(op):
    with torch.no_grad():
        together = ROWS[op](slice(0, T))
        alone = torch.cat([ROWS[op](slice(i, i + 1)) for i in range(T)])
    assert torch.equal(together, alone)


def test_equal_scores_go_to_the_lower_expert_and_nan_to_a_real_one():
    with torch.no_grad():
        tied = route(torch.zeros(1, 6), torch.zeros(6), 3, True, 1.0)
        broken = route(torch.full((1, 6), torch.nan), torch.zeros(6), 3, True, 1.0)
    assert tied.expert_TR.tolist() == [[0, 1, 2]]
    assert sorted(broken.expert_TR[0].tolist()) == [0, 1, 2]
