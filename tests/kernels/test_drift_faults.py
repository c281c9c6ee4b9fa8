"""A state that is kept in bf16 is rounded once a step: what does that is green, and whatever else
becomes of it is found."""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import replace
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor

from perilune.kernels.common.cases import BF16, FP32
from perilune.kernels.kda_step.reference import kda_step
from perilune.kernels.registry import spec
from perilune.kernels.testing import CheckResult, check_properties

STATES = ("window_SWC", "state_SHKV")
Inputs = dict[str, Any]


def in_fp32(x: Inputs) -> Inputs:
    """Copies, so that the states are only written where they are kept."""
    return {
        name: value.to(torch.float32, copy=True)
        if isinstance(value, Tensor) and value.is_floating_point()
        else value
        for name, value in x.items()
    }


def kept(keep: Callable[[Tensor, torch.dtype], Tensor]) -> Callable[..., Tensor]:
    """One step in fp32, of which `keep(state, dtype of the pool)` is kept."""

    def run(**x: Any) -> Tensor:
        wide = in_fp32(x)
        o_THV = kda_step(**wide)
        for name in STATES:
            x[name].copy_(keep(wide[name], x[name].dtype))
        return o_THV.to(x["gate_THV"].dtype)

    return run


def truncated(state: Tensor, dtype: torch.dtype) -> Tensor:
    if dtype == torch.float32:
        return state
    return (state.contiguous().view(torch.int32) & -(2**16)).view(torch.float32)


def decayed_in_bf16(**x: Any) -> Tensor:
    """The decayed state is rounded, and what is written to it once more."""
    wide = in_fp32(x)
    decayed = in_fp32(wide)
    kda_step(**decayed | {"b_TH": torch.full_like(wide["b_TH"], -1e4)})
    wide["state_SHKV"] = decayed["state_SHKV"].bfloat16().float()
    o_THV = kda_step(**wide | {"z_THK": torch.full_like(wide["z_THK"], -1e4)})
    for name in STATES:
        x[name].copy_(wide[name])
    return o_THV.to(x["gate_THV"].dtype)


LONG = "128 steps, every gate near zero"
NARROW, WIDE = "one step, rounded once", "one step, fp32 state"
FAULTS = {
    "truncated": (kept(truncated), {LONG, NARROW}),
    "decayed_in_bf16": (decayed_in_bf16, {f"{LONG}, fp32 state", NARROW, WIDE}),
    "bf16_in_an_fp32_pool": (
        kept(lambda state, dtype: state.bfloat16()),
        {f"{LONG}, fp32 state", WIDE},
    ),
}


@pytest.fixture
def drifting(monkeypatch):
    """What family `drift` finds in bf16 of a `kda_step`."""

    def found(run: Callable[..., Tensor]) -> list[CheckResult]:
        module = ModuleType("planted")
        module.__dict__["run"] = run
        monkeypatch.setitem(sys.modules, "planted", module)
        bf16 = replace(
            spec("kda_step"), reference="planted:run", backends={}, tolerance=FP32 | BF16
        )
        results = check_properties(bf16, drawn=3, tier="cpu", families=["drift"])
        return [r for r in results if r.backend == "reference bfloat16"]

    return found


def test_a_state_that_is_rounded_once_a_step_is_green(drifting):
    results = drifting(kept(Tensor.to))
    assert {r.case for r in results} == {LONG, f"{LONG}, fp32 state", NARROW, WIDE}
    assert [r for r in results if not r.passed] == []


@pytest.mark.parametrize("fault", FAULTS)
def test_a_state_of_which_more_is_lost_is_red(fault, drifting):
    run, cases = FAULTS[fault]
    assert {r.case for r in drifting(run) if not r.passed} == cases


def test_only_a_state_of_few_bits_is_granted_anything(drifting):
    plain = BF16[torch.bfloat16].forward
    for r in drifting(kept(Tensor.to)):
        if r.case == f"{LONG}, fp32 state":
            assert r.bound == plain
        if r.case == LONG:
            steps = int(r.what.rpartition(" ")[2])
            assert r.bound == pytest.approx(plain + (steps / 3) ** 0.5 * 2**-8)
    fp32 = check_properties(
        spec("kda_step"), drawn=3, backend="reference", tier="cpu", families=["drift"]
    )
    assert {r.bound for r in fp32} == {FP32[torch.float32].forward}
