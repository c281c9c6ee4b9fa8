"""Peers are called as they want to be; stand-ins with their signatures answer with the truth."""

from __future__ import annotations

import sys
import types

import pytest
import torch

from perilune.kernels.bench.cases import Case
from perilune.kernels.bench.inputs import Copies
from perilune.kernels.bench.peers import ready, versions
from perilune.kernels.bench.verify import Truth
from perilune.kernels.common.cases import FP32
from perilune.kernels.common.packing import Packing
from perilune.kernels.kda import bench_peers
from perilune.kernels.kda.bench_cases import one_token_each, sequences
from perilune.kernels.kda.reference import kda_chunk, kda_decode
from perilune.kernels.kda_step import bench_cases as step_cases
from perilune.kernels.kda_step.reference import kda_step

LENGTHS = [(24, 24), (40,), (7, 21, 12)]
called: list[dict[str, object]] = []


def packed(q, k, v, g, beta, A_log, dt_bias, lower_bound, state_NHKV, cu_seqlens):
    b, length = q.shape[:2]
    packing = Packing.of((length,) * b)
    if cu_seqlens is not None:
        assert b == 1
        packing = Packing.from_cu_seqlens(cu_seqlens.tolist())
    flat = [x.flatten(0, 1) for x in (q, k, v, g, beta)]
    o_THV, state = kda_chunk(*flat, A_log, dt_bias, packing, lower_bound, state_NHKV)
    return o_THV.unflatten(0, (b, length)), state


def fake_chunk_kda(
    q,
    k,
    v,
    g,
    beta,
    scale=None,
    initial_state=None,
    output_final_state=False,
    use_qk_l2norm_in_kernel=False,
    use_gate_in_kernel=False,
    use_beta_sigmoid_in_kernel=False,
    safe_gate=False,
    lower_bound=None,
    disable_recompute=False,
    state_v_first=False,
    cu_seqlens=None,
    cu_seqlens_cpu=None,
    *,
    A_log,
    dt_bias,
):
    called.append(locals().copy())
    assert use_qk_l2norm_in_kernel
    assert use_gate_in_kernel
    assert use_beta_sigmoid_in_kernel
    assert output_final_state
    assert safe_gate
    assert scale == q.shape[-1] ** -0.5
    assert dt_bias.shape == (q.shape[2] * q.shape[3],)
    bias_HK = dt_bias.view(q.shape[2:])
    return packed(q, k, v, g, beta, A_log, bias_HK, lower_bound, initial_state, cu_seqlens)


def fake_fused_recurrent_kda_fwd(
    q,
    k,
    v,
    g,
    beta,
    A_log=None,
    dt_bias=None,
    initial_state=None,
    scale=None,
    output_final_state=False,
    inplace_final_state=True,
    use_qk_l2norm_in_kernel=False,
    use_gate_in_kernel=False,
    use_beta_sigmoid_in_kernel=False,
    lower_bound=None,
    out=None,
):
    assert inplace_final_state
    assert use_qk_l2norm_in_kernel
    assert use_gate_in_kernel
    assert use_beta_sigmoid_in_kernel
    bias_HK = dt_bias.view(q.shape[2:])
    tokens = [x[:, 0] for x in (q, k, v, g, beta)]
    out[:, 0] = kda_decode(*tokens, A_log, bias_HK, initial_state, lower_bound)
    return out, initial_state


def fake_fwd(
    q,
    k,
    v,
    g,
    beta,
    scale,
    out,
    A_log,
    dt_bias,
    lower_bound,
    initial_state=None,
    final_state=None,
    cu_seqlens=None,
):
    state_NHKV = initial_state.mT
    o, state = packed(q, k, v, g, beta, A_log, dt_bias, lower_bound, state_NHKV, cu_seqlens)
    out.copy_(o)
    final_state.copy_(state.mT)


@pytest.fixture
def installed(monkeypatch):
    def module(name, **attributes):
        made = types.ModuleType(name)
        made.__dict__.update(attributes)
        made.__spec__ = types.SimpleNamespace(name=name)
        monkeypatch.setitem(sys.modules, name, made)

    module("fla")
    module("fla.ops")
    module("fla.ops.kda", chunk_kda=fake_chunk_kda)
    module("fla.ops.kda.fused_recurrent", fused_recurrent_kda_fwd=fake_fused_recurrent_kda_fwd)
    module("flash_kda", fwd=fake_fwd)
    called.clear()


def truth(reference, mutated=(), backward=False):
    return Truth(
        reference=reference,
        tolerance=FP32[torch.float32],
        mutated=frozenset(mutated),
        backward=backward,
        excerpt=None,
    )


def bound(peer, case, of):
    copies = Copies(case, torch.device("cpu"))
    copies.rotate_beyond(0)
    return ready(peer, case, copies, of)


@pytest.mark.usefixtures("installed")
@pytest.mark.parametrize("lengths", LENGTHS)
@pytest.mark.parametrize("peer", [bench_peers.FLA_CHUNK, bench_peers.FLASH], ids=lambda p: p.name)
def test_prefill_peers_compute_the_same_from_the_same_inputs(peer, lengths):
    case = Case(make=sequences(lengths, 2, 8))
    found = bound(peer, case, truth(kda_chunk))
    assert found.note == ""
    assert found.error is not None
    assert found.error < 1e-5
    assert found.contender is not None
    assert found.contender.num_calls == 3


@pytest.mark.usefixtures("installed")
@pytest.mark.parametrize("peer", [bench_peers.FLA_CHUNK, bench_peers.FLA_KEPT])
def test_training_peers_run_backward(peer):
    case = Case(make=sequences((24, 24), 2, 8), backward=True)
    found = bound(peer, case, truth(kda_chunk, backward=True))
    assert (found.note, found.error is not None and found.error < 1e-5) == ("", True)
    assert {bool(c["disable_recompute"]) for c in called} == {peer is bench_peers.FLA_KEPT}


@pytest.mark.usefixtures("installed")
def test_the_decode_peer_updates_its_state_in_place():
    case = Case(make=one_token_each(3, 2, 8))
    found = bound(bench_peers.FLA_DECODE, case, truth(kda_decode, {"state_NHKV"}))
    assert found.note == ""
    assert found.error is not None
    assert found.error < 1e-5


@pytest.mark.usefixtures("installed")
def test_a_peer_that_does_less_is_run_but_not_compared():
    case = Case(make=step_cases.step(3, 2, 8))
    mutated = {"window_SWC", "state_SHKV"}
    found = bound(step_cases.FLA, case, truth(kda_step, mutated))
    assert found.note == ""
    assert found.error is None
    assert found.contender is not None


@pytest.mark.usefixtures("installed")
def test_a_peer_that_fails_says_why():
    case = Case(make=sequences((24,), 2, 8))
    found = bound(bench_peers.FLASH_SPLIT, case, truth(kda_chunk))
    assert found.contender is None
    assert found.note == "failed: this version has no fwd_cp"


def test_a_peer_that_is_missing_says_so():
    case = Case(make=sequences((24,), 2, 8))
    found = bound(bench_peers.FLASH, case, truth(kda_chunk))
    assert (found.contender, found.error, found.note) == (None, None, "not installed")
    assert versions([bench_peers.FLASH]) == {"flash_kda": "not installed"}
