"""Muon against its definition: singular values in fp64, one matrix and one head at a time."""

import copy
import math
import subprocess
import sys
from pathlib import Path

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from perilune.train import muon
from perilune.train.muon import NS_COEFFICIENTS, NS_STEPS, Muon, orthogonalise

RANKS = Path(__file__).with_name("muon_ranks.py")


def orthogonalised_by_svd(g):
    """In fp64: the singular vectors of g, with its singular values (over their norm) through the
    five quintics. That is what Newton-Schulz is to compute without them."""
    u, s, vh = torch.linalg.svd(g.double(), full_matrices=False)
    s = s / (s.square().sum(-1, keepdim=True).sqrt() + 1e-7)
    a, b, c = NS_COEFFICIENTS
    for _ in range(NS_STEPS):
        s = a * s + b * s**3 + c * s**5
    return u @ (s[..., None] * vh)


@given(
    seed=st.integers(0, 1000),
    shape=st.sampled_from(
        [(24, 24), (16, 40), (40, 16), (1, 9), (9, 1), (3, 20, 12), (2, 2, 5, 7)]
    ),
    scale=st.sampled_from([1e-4, 1.0, 1e4]),
    rank=st.sampled_from([1, 3, 40]),
)
@settings(max_examples=50, deadline=None)
def test_newton_schulz_is_what_singular_values_say(seed, shape, scale, rank):
    generator = torch.Generator().manual_seed(seed)
    left = torch.randn(*shape[:-1], min(rank, *shape[-2:]), generator=generator)
    right = torch.randn(*shape[:-2], left.shape[-1], shape[-1], generator=generator)
    g = scale * left @ right
    expected = orthogonalised_by_svd(g)
    torch.testing.assert_close(orthogonalise(g).double(), expected, rtol=1e-3, atol=2e-4)
    in_fp64 = orthogonalise(g.double())
    torch.testing.assert_close(in_fp64, expected, rtol=1e-9, atol=1e-9)


def test_singular_values_end_near_one():
    g = torch.randn(48, 64, generator=torch.Generator().manual_seed(0))
    before, after = torch.linalg.svdvals(g), torch.linalg.svdvals(orthogonalise(g))
    # The quintic trades accuracy for speed: it ends in a band around 1.
    assert after.max() < 1.3
    assert after[before > 0.05 * before.max()].min() > 0.6


def test_a_gradient_of_zeros_moves_nothing():
    assert (orthogonalise(torch.zeros(3, 4, 5)) == 0).all()


def slow_muon(p, grads, lr, momentum, weight_decay):
    """One block, from the description: EMA, Nesterov, singular values, AdamW's scale."""
    buffer = torch.zeros_like(p)
    for g in grads:
        buffer = momentum * buffer + (1 - momentum) * g
        x = orthogonalised_by_svd((1 - momentum) * g + momentum * buffer)
        p = p - lr * weight_decay * p - lr * 0.2 * math.sqrt(max(p.shape)) * x
    return p


OPTIONS = {"lr": 0.02, "momentum": 0.9, "weight_decay": 0.1}
CASES = {
    "whole": ((8, 12), (), [slice(0, 8)]),
    "tall": ((12, 8), (), [slice(0, 12)]),
    "heads": ((12, 7), (4,), [slice(0, 4), slice(4, 8), slice(8, 12)]),
    "keys_and_values": (
        (15, 6),
        (3, 2),
        [
            slice(a, b)
            for first in (0, 5, 10)
            for a, b in ((first, first + 3), (first + 3, first + 5))
        ],
    ),
}


def test_muon_is_a_loop_over_heads_and_experts():
    generator = torch.Generator().manual_seed(2)
    shapes = {name: shape for name, (shape, _, _) in CASES.items()} | {"experts": (3, 6, 10)}
    starts = {n: torch.randn(s, generator=generator, dtype=torch.double) for n, s in shapes.items()}
    grads = [
        {n: torch.randn(s, generator=generator, dtype=torch.double) for n, s in shapes.items()}
        for _ in range(3)
    ]
    params = {name: torch.nn.Parameter(start.clone()) for name, start in starts.items()}
    groups = [{"params": [params["experts"]]}]
    groups += [{"params": [params[n]], "blocks": blocks} for n, (_, blocks, _) in CASES.items()]
    optimizer = Muon(groups, **OPTIONS)
    for step in grads:
        for name, p in params.items():
            p.grad = step[name].clone()
        optimizer.step()
    for name, (_, _, rows) in CASES.items():
        for own in rows:
            expected = slow_muon(starts[name][own], [g[name][own] for g in grads], **OPTIONS)
            torch.testing.assert_close(params[name].detach()[own], expected, msg=name)
    for e in range(3):
        expected = slow_muon(starts["experts"][e], [g["experts"][e] for g in grads], **OPTIONS)
        torch.testing.assert_close(params["experts"].detach()[e], expected)


def test_whole_matrices_move_as_by_torchs_own_muon():
    """Which computes in bf16."""
    generator = torch.Generator().manual_seed(3)
    start = torch.randn(24, 40, generator=generator)
    ours, theirs = (torch.nn.Parameter(start.clone()) for _ in range(2))
    optimizers = [
        Muon([ours], **OPTIONS),
        torch.optim.Muon([theirs], adjust_lr_fn="match_rms_adamw", **OPTIONS),
    ]
    for _ in range(4):
        g = torch.randn(24, 40, generator=generator)
        for p, optimizer in zip((ours, theirs), optimizers, strict=True):
            p.grad = g.clone()
            optimizer.step()
    moved = (ours - start).norm()
    assert (ours - theirs).norm() < 0.02 * moved


def test_the_update_has_adamws_size_whatever_the_blocks():
    """A root mean square of about 0.2 lr, of a head as of a whole matrix."""
    generator = torch.Generator().manual_seed(4)
    for blocks in ((), (16,), (4,)):
        p = torch.nn.Parameter(torch.zeros(64, 48))
        p.grad = torch.randn(64, 48, generator=generator)
        Muon([p], lr=1.0, momentum=0.0, weight_decay=0.0, blocks=blocks).step()
        assert 0.14 < float(p.detach().square().mean().sqrt()) < 0.24, blocks


def test_parameters_without_a_gradient_are_left_alone():
    p = torch.nn.Parameter(torch.ones(4, 4))
    Muon([p], lr=1.0, momentum=0.9, weight_decay=0.5).step()
    assert (p == 1).all()


def parameters(generator):
    shapes = [(12, 8), (12, 8), (8, 12), (3, 4, 8), (16, 8)]
    return [torch.nn.Parameter(torch.randn(shape, generator=generator)) for shape in shapes]


def grouped(params):
    groups = [{"params": params[:4]}, {"params": params[4:], "blocks": (4,)}]
    return Muon(groups, **OPTIONS)


def test_a_saved_state_goes_on_with_the_same_bits():
    params = parameters(torch.Generator().manual_seed(5))
    optimizer = grouped(params)
    generator = torch.Generator().manual_seed(6)
    grads = [[torch.randn(p.shape, generator=generator) for p in params] for _ in range(4)]

    def run(params, optimizer, grads):
        for step in grads:
            for p, g in zip(params, step, strict=True):
                p.grad = g.clone()
            optimizer.step()

    run(params, optimizer, grads[:2])
    resumed = [torch.nn.Parameter(p.detach().clone()) for p in params]
    other = grouped(resumed)
    other.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    assert other.param_groups[1]["blocks"] == (4,)
    run(params, optimizer, grads[2:])
    run(resumed, other, grads[2:])
    assert all(torch.equal(a, b) for a, b in zip(params, resumed, strict=True))


def test_blocks_of_one_shape_share_their_products(monkeypatch):
    """Heads and experts cost no calls of their own; and no more lies beside the model than said."""
    shapes = []

    def seen(g, call=orthogonalise):
        shapes.append(tuple(g.shape))
        return call(g)

    monkeypatch.setattr(muon, "orthogonalise", seen)
    params = parameters(torch.Generator().manual_seed(7))
    for p in params:
        p.grad = torch.ones_like(p)
    grouped(params).step()
    assert sorted(shapes) == [(1, 8, 12), (2, 12, 8), (3, 4, 8), (4, 4, 8)]

    shapes.clear()
    monkeypatch.setattr(muon, "AT_ONCE", 100)
    grouped(params).step()
    assert sorted(shapes) == [(1, 8, 12), (1, 12, 8), (1, 12, 8), (3, 4, 8), (4, 4, 8)]


def test_two_ranks_equal_one(tmp_path):
    """Matrices, heads and experts that are shared out, in whichever way."""
    subprocess.run([sys.executable, RANKS, tmp_path], check=True)
    alone = torch.load(tmp_path / "alone")
    for rank in range(2):
        found = torch.load(tmp_path / str(rank))
        assert found["params"].keys() == alone["params"].keys()
        for name, p in alone["params"].items():
            torch.testing.assert_close(found["params"][name], p, rtol=1e-5, atol=1e-6, msg=name)
        # Heads and experts of which every rank has some are not sent around.
        assert found["gathered"] == ["cut_heads", "experts_cut", "tall", "whole"]
