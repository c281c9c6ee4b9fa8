"""Every op against its float64 truth: outputs, states, in-place changes and gradients."""

from __future__ import annotations

import ast
import inspect
from dataclasses import replace
from functools import cache
from importlib import import_module

import pytest
import torch

from perilune.core.errors import UnsupportedError
from perilune.kernels.registry import OPS, load_attr, spec
from perilune.kernels.testing import CheckResult, check, implementation, implementations

PAIRS = [(op, case) for op in OPS for case in spec(op).cases]


@cache
def checked(op: str) -> list[CheckResult]:
    return list(check(spec(op)))


@pytest.mark.parametrize(("op", "case"), PAIRS, ids=lambda value: value)
@pytest.mark.parametrize("seed", [0, 1])
def test_every_implementation_equals_the_truth(op, case, seed):
    declared = spec(op)
    one = replace(declared, cases={case: declared.cases[case]})
    results = list(check(one, seed=seed))
    assert results
    for result in results:
        assert result.passed, result


@pytest.mark.parametrize("op", OPS)
def test_gradients_are_checked_where_training_needs_them(op):
    graded = {r.what for r in checked(op) if r.what.startswith("grad ")}
    if op in ("kda_step", "permute"):
        assert not graded  # they write into their state, or make integers
    else:
        assert graded


@pytest.mark.parametrize("op", OPS)
def test_every_implementation_is_checked_as_in_inference_too(op):
    for backend in {r.backend for r in checked(op)}:
        whats = {r.what for r in checked(op) if r.backend == backend}
        assert "output 0" in whats
        assert {f"inference {w}" for w in whats if w.startswith(("output", "after"))} <= whats


@pytest.mark.parametrize("op", OPS)
def test_the_truth_is_not_the_reference(op):
    """An oracle may share the types of a reference, and calls none of its functions."""
    module = import_module(spec(op).oracle.partition(":")[0])
    for node in ast.walk(ast.parse(inspect.getsource(module))):
        if isinstance(node, ast.ImportFrom) and (node.module or "").endswith(".reference"):
            names = [alias.name for alias in node.names]
            assert all(inspect.isclass(load_attr(f"{node.module}:{name}")) for name in names)


def test_a_backend_is_held_to_the_dtypes_that_it_serves(monkeypatch):
    monkeypatch.setattr(implementation, "is_here", lambda device: True)
    served = {i.backend: set(i.tolerance) for i in implementations(spec("experts"))}
    assert served["reference"] == {torch.float32}
    assert served["cuda"] == {torch.float32, torch.bfloat16}


def test_a_bf16_backend_is_checked_in_bf16():
    declared = spec("experts")
    bf16 = {torch.bfloat16: declared.backend_tolerance["cuda"][torch.bfloat16]}
    path = "perilune.kernels.experts.grouped:experts"
    grouped = replace(declared, backends={"cpu": path}, backend_tolerance={"cpu": bf16})
    results = list(check(grouped, backend="cpu"))
    assert {r.backend for r in results} == {"cpu bfloat16"}
    assert all(r.passed for r in results), [r for r in results if not r.passed]
    # bf16 rounds: a result as exact as fp32 would mean that another path had run.
    assert max(r.error for r in results) > 1e-4


def test_a_device_without_a_backend_runs_the_reference(monkeypatch):
    monkeypatch.setattr(implementation, "is_here", lambda device: True)
    without = replace(spec("linear"), backends={})
    (only,) = implementations(without, "cuda")
    assert (only.path, only.device) == (without.reference, "cuda")


def test_an_absent_device_is_refused(monkeypatch):
    monkeypatch.setattr(implementation, "is_here", lambda device: False)
    with pytest.raises(UnsupportedError, match="no cuda device here"):
        list(check(spec("experts"), backend="cuda"))
