"""Torch's own way to choose and to group gives what the ops give."""

from __future__ import annotations

import pytest
import torch
from peer_stand_ins import bound, truth

from perilune.kernels.bench.cases import Case
from perilune.kernels.router import bench_cases
from perilune.kernels.router.permutation import permute
from perilune.kernels.router.reference import route

CASES = {
    "router": (route, Case(make=bench_cases.tokens(5, 40, 6))),
    "permute": (permute, Case(make=bench_cases.pairs(40, 30, 4), dtype=torch.int64)),
}


@pytest.mark.parametrize("op", CASES)
def test_a_peer_computes_the_same_from_the_same_inputs(op):
    reference, case = CASES[op]
    declared = bench_cases.BENCHES[op].cases["T8192_E896_R16"]
    plain, compiled = declared.peers
    assert compiled.name == f"{plain.name}, compiled"
    found = bound(plain, case, truth(reference))
    assert found.note == ""
    assert found.errors.outputs is not None
    assert found.errors.outputs < 1e-6
