"""The peers of the AttnRes read and the GLU are called as they want to be."""

from __future__ import annotations

import sys
from types import ModuleType

import pytest
import torch
from peer_stand_ins import bound, truth

from perilune.kernels.attn_res import bench_cases as attn_cases
from perilune.kernels.attn_res.reference import attn_res
from perilune.kernels.bench.cases import Case
from perilune.kernels.situ import bench_cases as situ_cases
from perilune.kernels.situ.reference import situ_glu


def fake_fused_attnres(query, residuals, rms_weight, output_rms_weight=None, rms_eps=1e-6,
                       scale=1.0, return_weights=False, checkpoint_level=1):  # fmt: skip
    assert not return_weights
    assert scale == 1.0
    assert all(x.is_contiguous() for x in residuals)
    *blocks, partial = residuals
    norm = {"weight_D": output_rms_weight, "norm_eps": rms_eps}
    return attn_res(partial, blocks, query * rms_weight, rms_eps, **norm).h_TD


def fake_swiglu(x, y):
    return torch.nn.functional.silu(x) * y


@pytest.fixture(autouse=True)
def fla(monkeypatch):
    functions = {
        "fla.ops.attnres": {"fused_attnres": fake_fused_attnres},
        "fla.modules.activations": {"swiglu": fake_swiglu},
    }
    for name in ("fla", "fla.ops", "fla.modules", *functions):
        module = ModuleType(name)
        module.__spec__ = object()
        vars(module).update(functions.get(name, {}))
        monkeypatch.setitem(sys.modules, name, module)


CASES = {
    "read": (attn_res, attn_cases, "attn_res", attn_cases.read(4, 5, 8)),
    "step": (attn_res, attn_cases, "attn_res", attn_cases.step(4, 5, 8)),
    "glu": (situ_glu, situ_cases, "situ", situ_cases.rows(5, 8, caps=False)),
}


@pytest.mark.parametrize("backward", [False, True])
@pytest.mark.parametrize("name", CASES)
def test_a_peer_computes_the_same_from_the_same_inputs(name, backward):
    reference, cases, op, make = CASES[name]
    (peer,) = {case.peers for case in cases.BENCHES[op].cases.values() if case.peers}.pop()
    case = Case(make=make, backward=backward)
    found = bound(peer, case, truth(reference, backward=backward))
    assert found.note == ""
    assert found.errors.outputs is not None
    assert found.errors.outputs < 1e-6
