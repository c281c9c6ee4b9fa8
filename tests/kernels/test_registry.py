"""The registry's errors and choices, and what counts as equal."""

from __future__ import annotations

import logging
import math
from dataclasses import replace
from importlib import import_module
from pkgutil import iter_modules

import pytest
import torch

from perilune import model
from perilune.core.errors import UnsupportedError
from perilune.kernels import registry
from perilune.kernels.common.packing import Packing
from perilune.kernels.registry import OPS, Op, load_attr, resolve, resolved, spec
from perilune.kernels.serving import serving
from perilune.kernels.testing import CheckResult, check, relative_error


@pytest.mark.parametrize("name", OPS)
def test_every_declaration_resolves(name):
    declared = spec(name)
    assert declared.name == name
    paths = [declared.reference, *declared.backends.values()]
    if declared.oracle is not None:
        paths.append(declared.oracle)
    assert all(callable(load_attr(path)) for path in paths)
    assert declared.cases
    assert "->" in declared.signature


@pytest.mark.parametrize("find", [spec, resolve])
def test_an_unknown_op_is_named_with_the_known_ones(find):
    with pytest.raises(UnsupportedError, match=r"unknown op 'kda_chunks'; known: .*kda_chunk, "):
        find("kda_chunks")


def test_whatever_the_model_resolves_has_a_backend_of_its_own_on_a_gpu():
    for module in iter_modules(model.__path__, f"{model.__name__}."):
        import_module(module.name)
    ops = [spec(name) for name in resolved()]
    assert {"linear", "kda_chunk", "kda_step", "mla_prefill", "mla_decode"} <= set(resolved())
    paths = {op.name: serving(op, "cuda").path for op in ops}
    assert [op.name for op in ops if paths[op.name] == op.reference] == []


def test_an_op_logs_its_choice_once(caplog):
    op = resolve("causal_conv")
    x, weight, packing = torch.ones(2, 4), torch.ones(4, 3), Packing.of([2])
    with caplog.at_level(logging.INFO, logger=registry.__name__):
        first = op(x, weight, packing)
        second = op(x, weight, packing)
    assert caplog.messages == [
        "op causal_conv on cpu: perilune.kernels.causal_conv.reference:causal_conv"
        " (reference, since no backend is declared for it)"
    ]
    assert torch.equal(first.y_TC, second.y_TC)


def test_a_declared_backend_runs_in_place_of_the_reference(monkeypatch, caplog):
    declared = replace(spec("situ"), backends={"cpu": "somewhere:else"})
    monkeypatch.setattr(registry, "spec", lambda name: declared)
    monkeypatch.setattr(registry, "load_attr", lambda path: lambda *args, **kwargs: path)
    with caplog.at_level(logging.INFO, logger=registry.__name__):
        assert Op("situ")(torch.zeros(2), 4.0, 25.0) == "somewhere:else"
    assert caplog.messages == ["op situ on cpu: somewhere:else (own, declared for it)"]


def test_a_backend_that_does_not_exist_raises():
    with pytest.raises(AttributeError, match="no_such_thing"):
        load_attr("perilune.kernels.situ.reference:no_such_thing")


def test_relative_error_is_the_norm_of_the_gap_over_that_of_the_truth():
    want = torch.tensor([3.0, 4.0])
    assert relative_error(want, want) == 0
    assert relative_error(torch.tensor([3.0, 4.5]), want) == pytest.approx(0.1)
    assert relative_error(torch.tensor([0.25]), torch.zeros(1)) == 0.25
    assert relative_error(torch.zeros(0), torch.zeros(0)) == 0


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_what_is_not_finite_never_passes(bad):
    assert relative_error(torch.tensor([1.0, bad]), torch.ones(2)) == math.inf
    assert not CheckResult("op", "case", "reference", "output 0", math.nan, 1.0).passed


def test_a_truth_that_is_not_finite_never_passes():
    error = relative_error(torch.ones(1), torch.tensor([math.nan]))
    assert not CheckResult("op", "case", "reference", "output 0", error, 1e9).passed
    error = relative_error(torch.ones(1), torch.tensor([math.inf]))
    assert not CheckResult("op", "case", "reference", "output 0", error, 1e9).passed


def test_another_shape_never_passes_even_where_it_would_broadcast():
    assert relative_error(torch.ones(1, 2), torch.ones(2)) == math.inf
    assert relative_error(torch.ones(1), torch.ones(2)) == math.inf


def test_a_check_leaves_its_inputs_to_the_next_one_and_repeats_by_seed():
    declared = spec("kda_step")
    first, second, other = ([r.error for r in check(declared, seed=seed)] for seed in (0, 0, 1))
    assert first == second
    assert first != other
