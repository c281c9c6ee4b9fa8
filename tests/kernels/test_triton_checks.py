"""The property checks of a Triton kernel, in the interpreter: a right one is green, and each of its
planted faults is found by the family that is there for it."""

from __future__ import annotations

import sys
from functools import partial
from types import ModuleType

import pytest
import toy_op
import toy_triton

from perilune.kernels.registry import OPS
from perilune.kernels.testing import check, check_properties

FORWARD = {
    "row_unmasked": "poison",
    "reads_behind": "poison",
    "contiguous_assumed": "strides",
    "seventeenth_unwritten": "poison",
    "writes_past_the_end": "poison",
    "sees_the_next_token": "causality",
    "neighbour_s_state": "packs",
    "state_of_a_full_tile": "lengths",
    "sequences_joined": "packs",
    "history_of_32": "lengths",
    "state_never_read": "states",
    "wide_block_wrong": "configs",
    "nan_crosses": "poison",
}
STEP = {
    "slot_ignored": "pool",
    "next_slot_written": "pool",
    "padding_writes": "pool",
    "pool_contiguous_assumed": "strides",
    "state_in_bf16": "drift",
    "drafts_always_kept": "drafts",
}


@pytest.fixture(autouse=True)
def the_toy_is_an_op(monkeypatch):
    monkeypatch.setitem(OPS, "toy_step", "toy_op:STEP_SPEC")


def planted(monkeypatch, op, run):
    module = ModuleType("planted_triton")
    module.fault, module.CONFIGS = run, toy_triton.CONFIGS
    monkeypatch.setitem(sys.modules, "planted_triton", module)
    return toy_op.toy_spec(op, "planted_triton:fault")


def red(spec, *families):
    found = check_properties(spec, drawn=4, backend="cuda", tier="cpu", families=families)
    return {r.family for r in found if not r.passed}


@pytest.mark.parametrize("op", ["forward", "step"])
def test_a_right_kernel_is_green(op):
    spec = toy_op.toy_spec(f"toy_{op}", f"toy_triton:{op}")
    results = list(check_properties(spec, drawn=4, backend="cuda", tier="cpu"))
    results += check(spec, tier="cpu")
    assert [r for r in results if not r.passed] == []
    assert {r.backend for r in results} == {"reference", "cuda interpreted"}
    assert not any(r.refused for r in results)


@pytest.mark.parametrize("fault", FORWARD)
def test_a_fault_of_a_sequence_kernel_is_found(fault, monkeypatch):
    spec = planted(monkeypatch, "toy_forward", partial(toy_triton.forward, fault=fault))
    assert red(spec, FORWARD[fault]) == {FORWARD[fault]}


@pytest.mark.parametrize("fault", STEP)
def test_a_fault_of_a_pooled_kernel_is_found(fault, monkeypatch):
    spec = planted(monkeypatch, "toy_step", partial(toy_triton.step, fault=fault))
    assert red(spec, STEP[fault]) == {STEP[fault]}


def test_every_fault_of_the_toy_is_planted():
    assert ["", *FORWARD] == list(toy_triton.FORWARD_FAULTS)
    assert ["", *STEP] == list(toy_triton.STEP_FAULTS)
