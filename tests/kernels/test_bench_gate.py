"""The gate, on a clock that is simulated: ops say how long they take, and the machine is noisy."""

from __future__ import annotations

import random

import pytest
import torch

from perilune.kernels.bench import runner, subject
from perilune.kernels.bench.cases import Bench, Case, Work, drawn
from perilune.kernels.bench.ceilings import Ceilings
from perilune.kernels.bench.errors import RedOpError
from perilune.kernels.bench.gate import LEAST_NOISE, Verdict, judge, stored_medians
from perilune.kernels.bench.results import Row
from perilune.kernels.bench.rounds import Settings
from perilune.kernels.bench.runner import Bencher
from perilune.kernels.bench.stopwatch import Reading
from perilune.kernels.common.cases import FP32, normal
from perilune.kernels.registry import OpSpec

spent = {"seconds": 0.0, "each": 1e-3, "error": 0.0}


def truth(x_D):
    return 2 * x_D


def slept(x_D):
    spent["seconds"] += spent["each"]
    return x_D + x_D + spent["error"]


SPEC = OpSpec(
    name="planted",
    signature="(x_D) -> y_D",
    reference=f"{__name__}:truth",
    oracle=f"{__name__}:truth",
    backends={"cpu": f"{__name__}:slept"},
    cases={"small": lambda g, d: {"x_D": normal(g, d, 5)}},
    tolerance=FP32,
)
BENCH = Bench(
    inside="all",
    work=lambda inputs, backward: Work(1, 1),
    cases={"one": Case(make=lambda g, d: {"x_D": drawn(g, d, 8)})},
)


class Simulated:
    """Counts what ops say they spend, each round off by a few percent."""

    slack_s = 0.0

    def __init__(self, noise):
        self._random, self._noise = random.Random(3), noise
        self.drift = 1.0

    def time(self, run):
        before = spent["seconds"]
        run()
        seconds = (spent["seconds"] - before) * self.drift
        seconds *= 1 + self._random.uniform(0, self._noise)
        return Reading(seconds, seconds)


class Drifting(Simulated):
    def time(self, run):
        self.drift *= 1.01
        return super().time(run)


def bencher(clock):
    return Bencher(
        device=torch.device("cpu"),
        device_name="CPU",
        stopwatch=clock,
        settings=Settings(min_rounds=10, max_rounds=10, seconds=0.0, rotate_bytes=0),
        ceilings=Ceilings(1e15, 1e18),
        date="2026-11-30",
        commit=None,
    )


@pytest.fixture(autouse=True)
def planted(monkeypatch):
    monkeypatch.setattr(runner, "spec", lambda _: SPEC)
    monkeypatch.setattr(subject, "bench", lambda _: BENCH)
    spent.update(seconds=0.0, each=1e-3, error=0.0)


def stored(clock=None):
    return bencher(clock or Simulated(0.04)).rows("planted", "one")


def test_the_same_code_passes():
    (verdict,) = judge(bencher(Simulated(0.04)), stored())
    assert verdict.passed
    assert verdict.ratio == pytest.approx(1, abs=0.02)


def test_a_slow_down_of_30_percent_is_a_regression():
    rows = stored()
    spent["each"] *= 1.3
    (verdict,) = judge(bencher(Simulated(0.04)), rows)
    assert not verdict.passed
    assert str(verdict).startswith("planted  one  cpu: 1.3")
    assert verdict.ratio == pytest.approx(1.3, abs=0.03)
    assert str(verdict).endswith(f"noise {verdict.noise:.3f}: REGRESSION")


def test_faster_code_passes():
    rows = stored()
    spent["each"] *= 0.5
    assert all(verdict.passed for verdict in judge(bencher(Simulated(0.04)), rows))


def test_a_slow_down_within_the_noise_passes():
    rows = stored()
    spent["each"] *= 1 + LEAST_NOISE / 2
    assert all(verdict.passed for verdict in judge(bencher(Simulated(0.0)), rows))


def test_a_machine_that_drifts_cannot_be_judged_and_does_not_pass():
    (verdict,) = judge(bencher(Drifting(0.0)), stored())
    assert verdict.word == "TOO NOISY"
    assert not verdict.passed


class SlowOnce(Simulated):
    """Something else ran during the first measurement."""

    def __init__(self, rounds):
        super().__init__(0.0)
        self._left = rounds

    def time(self, run):
        self._left -= 1
        self.drift = 1.5 if self._left > 0 else 1.0
        return super().time(run)


def test_a_slow_down_that_does_not_show_again_passes():
    rows = stored()
    (verdict,) = judge(bencher(SlowOnce(60)), rows)
    assert verdict.passed


def test_a_red_op_is_refused():
    rows = stored()
    spent["error"] = 1.0
    with pytest.raises(RedOpError):
        list(judge(bencher(Simulated(0.04)), rows))


def test_a_case_with_several_peers_is_judged_once():
    def row(**changes):
        times = {"median_ms": 2.0, "p10_ms": 1.0, "p90_ms": 3.0, "floor_ms": 0.1}
        return Row(**({"op": "a", "case": "c", "backend": "cuda"} | times | changes))

    rows = [row(peer="x"), row(peer="y"), row(op="b")]
    assert stored_medians(rows) == {("a", "c", "cuda"): 2.0, ("b", "c", "cuda"): 2.0}
    assert stored_medians(rows, "b") == {("b", "c", "cuda"): 2.0}


@pytest.mark.parametrize(
    ("now", "noise", "word"),
    [(1.29, 0.3, "TOO NOISY"), (1.1, 0.1, "ok"), (1.11, 0.1, "REGRESSION"), (0.5, 0.03, "ok")],
)
def test_words(now, noise, word):
    assert Verdict("op", "case", "cpu", 1.0, now, noise).word == word
