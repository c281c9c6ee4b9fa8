"""Peers are called as they want to be; stand-ins with their signatures answer with the truth."""

from __future__ import annotations

import sys

import peer_stand_ins
import pytest
from peer_stand_ins import bound, truth

from perilune.kernels.bench.cases import Case
from perilune.kernels.bench.peers import versions
from perilune.kernels.kda import bench_peers
from perilune.kernels.kda.bench_cases import sequences
from perilune.kernels.kda.reference import kda_chunk, kda_decode
from perilune.kernels.kda_step import bench_cases as step_cases
from perilune.kernels.kda_step.reference import kda_step

LENGTHS = [(24, 24), (40,), (7, 21, 12)]


@pytest.mark.usefixtures("kda_peers")
@pytest.mark.parametrize("lengths", LENGTHS)
@pytest.mark.parametrize("peer", [bench_peers.FLA_CHUNK, bench_peers.FLASH], ids=lambda p: p.name)
def test_prefill_peers_compute_the_same_from_the_same_inputs(peer, lengths):
    case = Case(make=sequences(lengths, 2, 8))
    found = bound(peer, case, truth(kda_chunk))
    assert found.note == ""
    assert found.errors.outputs is not None
    assert found.errors.outputs < 1e-5
    assert found.contender is not None
    assert found.contender.num_calls == 3


@pytest.mark.usefixtures("kda_peers")
@pytest.mark.parametrize("peer", [bench_peers.FLA_CHUNK, bench_peers.FLA_KEPT])
def test_training_peers_run_backward(peer):
    case = Case(make=sequences((24, 24), 2, 8), backward=True)
    found = bound(peer, case, truth(kda_chunk, backward=True))
    assert found.note == ""
    assert found.errors.outputs is not None
    assert found.errors.outputs < 1e-5
    assert found.errors.gradients is not None
    assert found.errors.gradients < 1e-5
    kept = {bool(call["disable_recompute"]) for call in peer_stand_ins.called}
    assert kept == {peer is bench_peers.FLA_KEPT}


def one_token_each(generator, dtype):
    inputs = sequences((1, 1, 1), 2, 8)(generator, dtype)
    del inputs["packing"]
    return {name.replace("_T", "_N"): value for name, value in inputs.items()}


@pytest.mark.usefixtures("kda_peers")
def test_the_decode_peer_updates_its_state_in_place():
    case = Case(make=one_token_each)
    found = bound(bench_peers.FLA_DECODE, case, truth(kda_decode, {"state_NHKV"}))
    assert found.note == ""
    assert found.errors.outputs is not None
    assert found.errors.outputs < 1e-5


@pytest.mark.usefixtures("kda_peers")
def test_a_peer_that_does_less_is_run_but_not_compared():
    case = Case(make=step_cases.step(3, 2, 8))
    mutated = {"window_SWC", "state_SHKV"}
    found = bound(step_cases.FLA, case, truth(kda_step, mutated))
    assert found.note == ""
    assert found.errors.outputs is None
    assert found.contender is not None


@pytest.mark.usefixtures("kda_peers")
def test_a_peer_that_fails_says_why(monkeypatch):
    def fwd(**arguments):
        raise RuntimeError("no kernel image for this device")

    monkeypatch.setattr(sys.modules["flash_kda"], "fwd", fwd)
    found = bound(bench_peers.FLASH, Case(make=sequences((24,), 2, 8)), truth(kda_chunk))
    assert found.contender is None
    assert found.note == "failed: no kernel image for this device"


def test_a_peer_that_is_missing_says_so():
    case = Case(make=sequences((24,), 2, 8))
    found = bound(bench_peers.FLASH, case, truth(kda_chunk))
    assert (found.contender, found.errors, found.note) == (None, (None, None), "not installed")
    assert versions([bench_peers.FLASH]) == {"flash_kda": "not installed"}
