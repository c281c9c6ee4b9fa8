"""Muon against its definition, the split of the parameters, and the schedule."""

import math
from itertools import pairwise

import pytest
import torch

from perilune.model.init import init_weights
from perilune.model.model import Transformer
from perilune.model.parse_config import parse_config
from perilune.model.presets import tiny_k3, tiny_kimi_linear
from perilune.train.config import OptimConfig
from perilune.train.optim import Muon, build_optimizers, lr_at, orthogonalise


@pytest.mark.parametrize("shape", [(24, 24), (16, 40), (40, 16), (3, 20, 12)])
def test_orthogonalised_singular_values_are_near_one(shape):
    generator = torch.Generator().manual_seed(0)
    g = torch.randn(shape, generator=generator)
    values = torch.linalg.svdvals(orthogonalise(g))
    # The quintic trades accuracy for speed: it ends in a band around 1.
    assert values.min() > 0.3
    assert values.max() < 1.3
    well = values[torch.linalg.svdvals(g) > 0.2 * torch.linalg.svdvals(g).max()]
    assert well.min() > 0.6


def test_orthogonalised_keeps_the_singular_vectors():
    g = torch.randn(20, 30, generator=torch.Generator().manual_seed(1))
    u, _, vh = torch.linalg.svd(g, full_matrices=False)
    inner = u.T @ orthogonalise(g) @ vh.T
    assert (inner - inner.diagonal().diag()).abs().max() < 1e-4
    assert (inner.diagonal() > 0).all()


def slow_muon(p, grads, lr, momentum, weight_decay):
    """One matrix, from the description: EMA, Nesterov, five iterations, AdamW's scale."""
    buffer = torch.zeros_like(p)
    for g in grads:
        buffer = momentum * buffer + (1 - momentum) * g
        x = (1 - momentum) * g + momentum * buffer
        x = x.T if p.shape[0] > p.shape[1] else x
        x = x / (x.norm() + 1e-7)
        for _ in range(5):
            a = x @ x.T
            x = 3.4445 * x - 4.7750 * a @ x + 2.0315 * a @ a @ x
        x = x.T if p.shape[0] > p.shape[1] else x
        p = p - lr * weight_decay * p - lr * 0.2 * math.sqrt(max(p.shape)) * x
    return p


def test_muon_matches_the_slow_version_matrix_by_matrix():
    generator = torch.Generator().manual_seed(2)
    shapes = [(8, 12), (8, 12), (12, 8), (3, 6, 10)]
    starts = [torch.randn(shape, generator=generator) for shape in shapes]
    grads = [[torch.randn(s, generator=generator) for s in shapes] for _ in range(3)]
    params = [torch.nn.Parameter(start.clone()) for start in starts]
    optimizer = Muon(params, lr=0.02, momentum=0.9, weight_decay=0.1)
    for step in grads:
        for p, g in zip(params, step, strict=True):
            p.grad = g.clone()
        optimizer.step()
    for i, (p, start) in enumerate(zip(params, starts, strict=True)):
        history = [step[i] for step in grads]
        if start.ndim == 2:
            expected = slow_muon(start, history, 0.02, 0.9, 0.1)
        else:
            matrices = [
                slow_muon(start[e], [g[e] for g in history], 0.02, 0.9, 0.1)
                for e in range(len(start))
            ]
            expected = torch.stack(matrices)
        torch.testing.assert_close(p.detach(), expected, rtol=1e-4, atol=1e-5)


def test_muon_leaves_parameters_without_a_gradient_alone():
    p = torch.nn.Parameter(torch.ones(4, 4))
    Muon([p], lr=1.0, momentum=0.9, weight_decay=0.5).step()
    assert (p == 1).all()


@pytest.mark.parametrize("raw", [tiny_k3(), tiny_kimi_linear()])
def test_every_parameter_has_exactly_one_optimiser(raw):
    model = init_weights(Transformer(parse_config(raw)), torch.Generator().manual_seed(0))
    muon, adam = build_optimizers(model, OptimConfig(weight_decay=0.3))
    groups = [*muon.param_groups, *adam.param_groups]
    ids = [id(p) for group in groups for p in group["params"]]
    assert len(ids) == len(set(ids))
    assert set(ids) == {id(p) for p in model.parameters()}

    names = {id(p): name for name, p in model.named_parameters()}
    by_muon = {names[id(p)] for p in muon.param_groups[0]["params"]}
    assert "model.layers.1.block_sparse_moe.experts.w13" in by_muon
    assert "model.layers.1.block_sparse_moe.gate.weight" in by_muon
    assert not any("embed" in n or "lm_head" in n or "conv1d" in n for n in by_muon)
    undecayed = {
        names[id(p)]
        for group in adam.param_groups
        if group["weight_decay"] == 0
        for p in group["params"]
    }
    assert {n for n in names.values() if "norm" in n or "res_proj" in n} <= undecayed
    assert {n for n in names.values() if n.endswith(("A_log", "dt_bias"))} <= undecayed


def test_schedule_warms_up_stays_and_falls_to_zero():
    config = OptimConfig(peak_lr=2.0, warmup_steps=10, decay_ratio=0.2)
    rates = [lr_at(step, 100, config) for step in range(101)]
    assert rates[:10] == pytest.approx([0.2 * n for n in range(1, 11)])
    assert rates[10:81] == [2.0] * 71
    assert rates[90] == pytest.approx(1.0)
    assert rates[99] == pytest.approx(0.1)
    assert rates[100] == 0
    assert all(a > b for a, b in pairwise(rates[80:]))


def test_the_constant_phase_does_not_depend_on_the_length_of_the_run():
    config = OptimConfig(decay_ratio=0.25)
    assert [lr_at(step, 1000, config) for step in range(750)] == [
        lr_at(step, 5000, config) for step in range(750)
    ]


def test_schedule_of_a_very_short_run():
    assert lr_at(0, 1, OptimConfig(peak_lr=1.0, warmup_steps=1)) == 1.0
