"""The learning rate over a run."""

from itertools import pairwise

import pytest

from perilune.core.errors import ConfigError
from perilune.train.config import OptimConfig
from perilune.train.schedule import lr_at


def test_schedule_warms_up_stays_and_falls_to_zero():
    config = OptimConfig(peak_lr=2.0, warmup_steps=10, decay_ratio=0.2)
    rates = [lr_at(step, 100, config) for step in range(101)]
    assert rates[:10] == pytest.approx([0.2 * n for n in range(1, 11)])
    assert rates[10:81] == [2.0] * 71
    assert rates[90] == pytest.approx(1.0)
    assert rates[99] == pytest.approx(0.1)
    assert rates[100] == 0
    assert all(a > b for a, b in pairwise(rates[80:]))


def test_the_constant_phase_does_not_depend_on_the_length_of_the_run():
    config = OptimConfig(decay_ratio=0.25)
    assert [lr_at(step, 1000, config) for step in range(750)] == [
        lr_at(step, 5000, config) for step in range(750)
    ]


def test_schedule_of_a_very_short_run():
    assert lr_at(0, 1, OptimConfig(peak_lr=1.0, warmup_steps=1)) == 1.0


def test_cosine_warms_up_and_falls_to_the_final_rate():
    config = OptimConfig(schedule="cosine", peak_lr=2.0, warmup_steps=11, final_lr_ratio=0.1)
    rates = [lr_at(step, 110, config) for step in range(111)]
    assert rates[:11] == pytest.approx([2.0 * n / 11 for n in range(1, 12)])
    assert rates[10] == 2.0
    assert rates[60] == pytest.approx(2.0 * (0.1 + 0.9 / 2))  # halfway between 10 and 110
    assert rates[35] == pytest.approx(2.0 * (0.1 + 0.9 * (1 + 0.5**0.5) / 2))
    assert rates[110] == pytest.approx(0.2)
    assert all(a > b for a, b in pairwise(rates[10:]))


def test_wsd_falls_to_the_final_rate():
    config = OptimConfig(peak_lr=2.0, warmup_steps=1, decay_ratio=0.5, final_lr_ratio=0.5)
    assert [lr_at(step, 8, config) for step in (0, 4, 6, 8)] == [2.0, 2.0, 1.5, 1.0]


@pytest.mark.parametrize("steps", [1, 2, 3])
def test_cosine_of_a_run_that_is_all_warm_up(steps):
    config = OptimConfig(schedule="cosine", peak_lr=1.0, warmup_steps=3)
    assert [lr_at(step, steps, config) for step in range(steps)] == pytest.approx(
        [(step + 1) / 3 for step in range(steps)]
    )


def test_an_unknown_schedule_is_refused():
    with pytest.raises(ConfigError, match="'linear'; there is: wsd, cosine"):
        OptimConfig(schedule="linear")
