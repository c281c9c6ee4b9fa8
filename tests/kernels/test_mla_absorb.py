"""Queries in latent space: written in place they are those that were put together."""

from __future__ import annotations

import torch

from perilune.kernels.mla import absorb


def inputs(t=3, h=4, k=5, c=8, r=2):
    generator = torch.Generator().manual_seed(0)
    q_THK = torch.randn(t, h, k + r, generator=generator)
    weight_HXC = torch.randn(h, 2 * k, c, generator=generator)
    return q_THK[..., :k], weight_HXC[:, :k], q_THK[..., k:]


def test_both_ways_give_the_definition():
    own_THK, weight_HKC, shared_THR = inputs()
    want = torch.cat([torch.einsum("thk,hkc->thc", own_THK, weight_HKC), shared_THR], -1)
    for way in (absorb.queries, absorb.written):
        q_THC = way(own_THK, weight_HKC, shared_THR)
        assert q_THC.is_contiguous()
        torch.testing.assert_close(q_THC, want)


def test_gradients_flow_to_queries_and_weight():
    leaves = [x.clone().requires_grad_() for x in inputs()]
    absorb.queries(*leaves).sum().backward()
    assert all(x.grad is not None and x.grad.abs().sum() > 0 for x in leaves)


def test_only_a_gpu_without_gradients_writes_in_place(monkeypatch):
    went, written = [], absorb.written
    monkeypatch.setattr(absorb, "written", lambda *x: went.append(1) or written(*x))

    class OnGpu(torch.Tensor):
        is_cuda = True

    own_THK, *rest = inputs()
    on_gpu = own_THK.as_subclass(OnGpu)
    absorb.queries(own_THK, *rest)
    with torch.inference_mode():
        absorb.queries(own_THK, *rest)
    absorb.queries(on_gpu, *rest)
    assert not went
    with torch.no_grad():
        absorb.queries(on_gpu, *rest)
    assert went
