"""Cheating kernels, planted one by one: no benchmark prints a time for any of them."""

from __future__ import annotations

import threading
import time
from dataclasses import replace

import pytest
import torch

from perilune.kernels.bench import runner, stopwatch, subject
from perilune.kernels.bench.cases import Bench, Case, Excerpt, Work, drawn
from perilune.kernels.bench.ceilings import Ceilings
from perilune.kernels.bench.errors import (
    DishonestError,
    ImpossibleTimeError,
    NotRunError,
    RedOpError,
    RefusedError,
)
from perilune.kernels.bench.rounds import Settings
from perilune.kernels.bench.runner import Bencher
from perilune.kernels.bench.stopwatch import CpuStopwatch, Reading
from perilune.kernels.common.cases import FP32, normal
from perilune.kernels.registry import OpSpec

TIMED = 64
"""Rows of the benchmark; conformance has fewer, so a cheat can tell them apart."""


def truth(x_TD, weight_DD):
    y_TD = x_TD
    for _ in range(8):
        y_TD = torch.tanh(y_TD @ weight_DD)
    return y_TD


def honest(x_TD, weight_DD):
    y_TD = torch.tanh(x_TD @ weight_DD)
    for _ in range(7):
        y_TD = torch.tanh(y_TD @ weight_DD)
    return y_TD


def oracle(x_TD, weight_DD):
    return honest(x_TD, weight_DD)


remembered: dict[int, torch.Tensor] = {}
seen: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}
workers: list[threading.Thread] = []


def by_pointer(x_TD, weight_DD):
    if len(x_TD) < TIMED:
        return honest(x_TD, weight_DD)
    if x_TD.data_ptr() not in remembered:
        remembered[x_TD.data_ptr()] = honest(x_TD, weight_DD)
    return remembered[x_TD.data_ptr()]


def by_pointer_and_version(x_TD, weight_DD):
    if len(x_TD) < TIMED:
        return honest(x_TD, weight_DD)
    key = hash((x_TD.data_ptr(), x_TD._version))
    if key not in remembered:
        remembered[key] = honest(x_TD, weight_DD)
    return remembered[key]


def by_value(x_TD, weight_DD):
    """Right each time, and cheaper when an input repeats."""
    old = seen.get(x_TD.data_ptr())
    if old is not None and torch.equal(old[0], x_TD):
        return old[1].clone()
    y_TD = honest(x_TD, weight_DD)
    if len(x_TD) == TIMED:
        seen[x_TD.data_ptr()] = (x_TD.clone(), y_TD.clone())
    return y_TD


class Lazy(torch.Tensor):
    """Would compute when somebody looks."""


def lazy(x_TD, weight_DD):
    y_TD = honest(x_TD, weight_DD)
    return y_TD.as_subclass(Lazy) if len(x_TD) == TIMED else y_TD


def in_a_thread(x_TD, weight_DD):
    if len(x_TD) < TIMED:
        return honest(x_TD, weight_DD)
    y_TD, x_TD = torch.zeros_like(x_TD), x_TD.clone()

    def work():
        time.sleep(1e-3)
        with torch.inference_mode():
            y_TD.copy_(honest(x_TD, weight_DD))

    workers.append(threading.Thread(target=work))
    workers[-1].start()
    return y_TD


def half_of_it(x_TD, weight_DD):
    y_TD = torch.zeros_like(x_TD) if len(x_TD) == TIMED else x_TD
    done = len(x_TD) // 2 if len(x_TD) == TIMED else len(x_TD)
    return torch.cat([honest(x_TD[:done], weight_DD), y_TD[done:]])


def honest_at_first(x_TD, weight_DD):
    seen[len(seen)] = (x_TD, x_TD)
    return honest(x_TD, weight_DD) * (len(seen) < 40)


def eats_its_input(x_TD, weight_DD):
    y_TD = honest(x_TD, weight_DD)
    if len(x_TD) == TIMED:
        x_TD.zero_()
    return y_TD


def changes_precision(x_TD, weight_DD):
    if len(x_TD) == TIMED:
        torch.set_float32_matmul_precision("medium")
    return honest(x_TD, weight_DD)


def falls_back(x_TD, weight_DD):
    return truth(x_TD, weight_DD)


def falls_back_in_a_thread(x_TD, weight_DD):
    found = []
    worker = threading.Thread(target=lambda: found.append(truth(x_TD, weight_DD)))
    worker.start()
    worker.join()
    return found[0]


def wrong(x_TD, weight_DD):
    return honest(x_TD, weight_DD) * 1.001


def conformance_inputs(generator, dtype):
    return {"x_TD": normal(generator, dtype, 3, 5), "weight_DD": normal(generator, dtype, 5, 5)}


def timed_inputs(generator, dtype):
    return {
        "x_TD": drawn(generator, dtype, TIMED, 128),
        "weight_DD": drawn(generator, dtype, 128, 128, scale=0.09),
    }


def work(inputs, backward):
    return Work(inputs["x_TD"].nbytes, 16 * TIMED * 128**2)


SPEC = OpSpec(
    name="planted",
    signature="(x_TD, weight_DD) -> y_TD",
    reference=f"{__name__}:truth",
    oracle=f"{__name__}:oracle",
    cases={"small": conformance_inputs},
    tolerance=FP32,
)
BENCH = Bench(inside="all", work=work, cases={"one": Case(make=timed_inputs)})
# Many attempts: on a loaded machine all the rounds of one may happen to be disturbed.
QUICK = Settings(min_rounds=6, max_rounds=6, seconds=0.0, rotate_bytes=0, attempts=6)


@pytest.fixture(autouse=True)
def clean():
    precision = torch.get_float32_matmul_precision()
    yield
    for worker in workers:
        worker.join()
    for store in (remembered, seen, workers):
        store.clear()
    torch.set_float32_matmul_precision(precision)


@pytest.fixture
def plant(monkeypatch):
    """A function that times the one of that name as the op's CPU backend."""

    def timed(name, clock=None, bench=BENCH, ceilings=None, backend=None):
        declared = replace(SPEC, backends={"cpu": f"{__name__}:{name}"} if name else {})
        monkeypatch.setattr(runner, "spec", lambda _: declared)
        monkeypatch.setattr(subject, "bench", lambda _: bench)
        bencher = Bencher(
            device=torch.device("cpu"),
            device_name="CPU",
            stopwatch=clock or CpuStopwatch(),
            settings=QUICK,
            ceilings=ceilings or Ceilings(1e12, 1e15),
            date="2026-11-30",
            commit=None,
        )
        return bencher.rows("planted", "one", backend)

    return timed


def test_an_honest_kernel_gets_its_row(plant):
    (row,) = plant("honest")
    assert (row.op, row.case, row.backend) == ("planted", "one", "cpu")
    assert 0 < row.p10_ms <= row.median_ms <= row.p90_ms
    assert 0 < row.floor_ms < row.median_ms
    assert row.error < 1e-5
    assert row.marks == []


def test_the_reference_is_timed_under_its_own_name(plant):
    assert [row.backend for row in plant(None)] == ["reference"]
    assert [row.backend for row in plant("honest", backend="reference")] == ["reference"]


@pytest.mark.parametrize("cheat", ["by_pointer", "by_pointer_and_version"])
def test_outputs_remembered_by_pointer_are_wrong_on_new_values(plant, cheat):
    with pytest.raises(DishonestError, match=r"output 0 is off by .* on new values"):
        plant(cheat)


@pytest.mark.parametrize("cheat", ["by_pointer", "by_pointer_and_version"])
def test_they_are_wrong_in_one_copy_too(plant, monkeypatch, cheat):
    monkeypatch.setitem(subject.LONG_CALL_S, "cpu", 0.0)
    with pytest.raises(DishonestError, match=r"output 0 is off by .* on new values"):
        plant(cheat)


def test_a_long_call_has_one_copy(plant, monkeypatch):
    made = []
    one = Case(make=lambda *drawing: made.append(0) or timed_inputs(*drawing))
    plant("honest", bench=replace(BENCH, cases={"one": one}))
    monkeypatch.setitem(subject.LONG_CALL_S, "cpu", 0.0)
    assert len(made) >= 3
    made.clear()
    plant("honest", bench=replace(BENCH, cases={"one": one}))
    assert len(made) == 1


def test_what_is_compared_of_a_case_is_told(plant):
    part = Excerpt(
        inputs=lambda inputs: inputs | {"x_TD": inputs["x_TD"][:5]},
        results=lambda results: {name: x[:5] for name, x in results.items()},
        said="errors of five rows",
    )
    one = Case(make=timed_inputs, excerpt=part)
    (row,) = plant("honest", bench=replace(BENCH, cases={"one": one}))
    assert row.marks == ["errors of five rows"]
    assert row.error < 1e-5


def test_less_work_on_a_repeated_input_is_noticed(plant):
    with pytest.raises(DishonestError, match="does less work when its input repeats"):
        plant("by_value")


def test_a_lazy_result_is_not_accepted(plant):
    with pytest.raises(DishonestError, match="returned a Lazy, not a plain tensor"):
        plant("lazy")


def test_work_in_a_thread_that_outlives_the_call_is_noticed(plant):
    with pytest.raises(DishonestError, match=r"after the call had returned|is off by"):
        plant("in_a_thread")


def test_half_the_work_at_the_size_that_is_timed_is_noticed(plant):
    with pytest.raises(DishonestError, match=r"output 0 is off by 7\.\de-01"):
        plant("half_of_it")


def test_a_kernel_that_is_honest_only_at_first_is_noticed(plant):
    with pytest.raises(DishonestError, match=r"output 0 is off by 1\.0e\+00"):
        plant("honest_at_first")


def test_an_input_that_is_eaten_is_noticed(plant):
    with pytest.raises(DishonestError, match="changed its input x_TD"):
        plant("eats_its_input")


def test_global_state_that_is_changed_is_noticed(plant):
    with pytest.raises(DishonestError, match="changed global state: fp32 matmul precision"):
        plant("changes_precision")


@pytest.mark.parametrize("cheat", ["falls_back", "falls_back_in_a_thread"])
def test_a_fall_back_to_the_reference_is_not_timed_as_the_backend(plant, cheat):
    with pytest.raises(NotRunError, match="handed to the reference"):
        plant(cheat)


class Unused:
    slack_s = 0.0

    def time(self, run):
        raise AssertionError("a clock was started")


def test_a_red_op_is_refused_before_any_clock_starts(plant):
    with pytest.raises(RedOpError, match=r"planted on cpu: \d checks are red: small, output 0"):
        plant("wrong", clock=Unused())


def test_a_backend_that_is_not_declared_is_refused(plant):
    with pytest.raises(NotRunError, match="declares no cpu backend: its reference would run"):
        plant(None, backend="cpu")
    with pytest.raises(NotRunError, match="cuda cannot be measured on cpu"):
        plant("honest", backend="cuda")


def test_a_dtype_without_a_tolerance_is_refused(plant):
    half = replace(BENCH, cases={"one": Case(make=timed_inputs, dtype=torch.float16)})
    with pytest.raises(RefusedError, match="float16 is not served"):
        plant("honest", bench=half)


class Broken:
    """Both clocks run too slowly."""

    slack_s = 0.0

    def time(self, run):
        reading = CpuStopwatch().time(run)
        return Reading(reading.seconds / 1e5, reading.wall_s / 1e5)


def test_a_time_below_the_data_sheet_is_rejected(plant):
    measured = Ceilings(1e11, 1e13)
    with pytest.raises(ImpossibleTimeError, match="the timer or the kernel is broken"):
        plant("honest", clock=Broken(), ceilings=measured)


def test_a_time_below_the_measured_ceilings_is_marked(plant):
    flops = work(timed_inputs(torch.Generator(), torch.float32), False).flops
    twice_as_slow = Ceilings(1e15, flops / 2e-3)
    (row,) = plant("honest", clock=Frozen(1e-3), ceilings=twice_as_slow)
    assert row.marks == ["suspicious: below the measured ceilings"]


class Frozen:
    slack_s = 0.0

    def __init__(self, seconds_a_call):
        self.seconds = 3 * seconds_a_call

    def time(self, run):
        run()
        return Reading(self.seconds, self.seconds)


def test_a_patched_timer_disagrees_with_the_second_clock(plant, monkeypatch):
    real = time.perf_counter_ns
    monkeypatch.setattr(stopwatch, "_perf_counter", lambda: real() // 10)
    with pytest.raises(ImpossibleTimeError, match="by the second clock"):
        plant("honest")
