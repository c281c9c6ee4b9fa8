"""The peers of convolution and norms are called as they want to be; stand-ins answer the truth."""

from __future__ import annotations

import sys
from types import ModuleType

import pytest
import torch
from peer_stand_ins import bound, truth

from perilune.kernels.bench.cases import Case
from perilune.kernels.causal_conv import bench_cases as conv_cases
from perilune.kernels.causal_conv.reference import causal_conv
from perilune.kernels.common.packing import Packing
from perilune.kernels.norm import bench_cases as norm_cases
from perilune.kernels.norm.reference import gated_rms_norm, rms_norm


def fake_causal_conv1d(
    x,
    weight=None,
    bias=None,
    residual=None,
    initial_state=None,
    output_final_state=False,
    activation=None,
    backend="triton",
    cu_seqlens=None,
):
    assert bias is None
    assert residual is None
    assert output_final_state
    assert activation == "silu"
    b, length, c = x.shape
    packing = Packing.of((length,) * b)
    if cu_seqlens is not None:
        assert b == 1
        packing = Packing.from_cu_seqlens(cu_seqlens.tolist())
    assert initial_state.shape == (packing.num_sequences, c, weight.shape[1])
    out = causal_conv(x.flatten(0, 1), weight, packing, initial_state[..., 1:].mT)
    oldest = torch.full_like(out.window_NWC[:, :1], torch.nan)
    return out.y_TC.view(x.shape), torch.cat([oldest, out.window_NWC], 1).mT.nan_to_num()


def fake_rms_norm(x, weight, bias, residual=None, eps=1e-5, prenorm=False, residual_in_fp32=False):
    assert bias is None
    return rms_norm(x, weight, eps)


def fake_rms_norm_gated(x, g, weight, bias, activation="swish", residual=None, prenorm=False,
                        residual_in_fp32=False, eps=1e-6):  # fmt: skip
    assert bias is None
    assert activation == "sigmoid"
    return gated_rms_norm(x, g, weight, eps)


@pytest.fixture(autouse=True)
def fla(monkeypatch):
    functions = {
        "fla.modules.causal_conv1d": {"causal_conv1d": fake_causal_conv1d},
        "fla.modules.norm.layernorm": {"rms_norm": fake_rms_norm},
        "fla.modules.norm.fused_norm_gate": {"rms_norm_gated": fake_rms_norm_gated},
    }
    for name in ("fla", "fla.modules", "fla.modules.norm", *functions):
        module = ModuleType(name)
        module.__spec__ = object()
        vars(module).update(functions.get(name, {}))
        monkeypatch.setitem(sys.modules, name, module)


CASES = {
    "dense": (causal_conv, conv_cases, "causal_conv", conv_cases.packed((8, 8), 6)),
    "packed": (causal_conv, conv_cases, "causal_conv", conv_cases.packed((3, 9), 6)),
    "norm": (rms_norm, norm_cases, "rms_norm", norm_cases.rows(5, 8)),
    "gated": (gated_rms_norm, norm_cases, "gated_rms_norm", norm_cases.rows(5, 2, 8, gated=True)),
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
