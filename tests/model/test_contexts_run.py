"""`bench contexts` as a whole at toy sizes: rows, failures, files, tables."""

from __future__ import annotations

import json
import time
from dataclasses import replace

import pytest
import torch

from perilune.core.errors import UnsupportedError
from perilune.kernels.bench.ceilings import Ceilings
from perilune.kernels.bench.rounds import Settings
from perilune.model.contexts import run as context_run
from perilune.model.contexts.kernel_times import Ran, kernel_times, summed
from perilune.model.contexts.plan import ALL_MLA, GQA, HYBRID, STACKS, Case, capacity
from perilune.model.contexts.rows import DecodeRow, PrefillRow, ResultFile, load, save
from perilune.model.contexts.run import Bench, Failed
from perilune.model.contexts.stacks import GQAStep
from perilune.model.contexts.tables import decode_table, ratio, ratio_table, report
from perilune.model.parse_config import parse_config
from perilune.model.presets import tiny_k3

TINY = parse_config(tiny_k3(num_hidden_layers=8))
BUDGET = 3_000_000
ENV = {
    "gpu": "a card",
    "driver": "1",
    "triton": "3",
    "torch": "2",
    "commit": "abc",
    "date": "today",
}
QUICK = Settings(seconds=0.0, min_rounds=2, max_rounds=2)
RATES = Ceilings(1e10, 1e11)


def bench(**changed) -> Bench:
    given = {"deadline_s": time.monotonic() + 1e6, "commit": "abc", "date": "2026-11-30", **changed}
    cpu, dtype = torch.device("cpu"), torch.bfloat16
    return Bench(
        config=TINY,
        device=cpu,
        dtype=dtype,
        rates=RATES,
        budget_bytes=BUDGET,
        settings=QUICK,
        **given,
    )


def measured_row(stack, context, n, ms, floor_ms, full=False) -> DecodeRow:
    return DecodeRow(
        stack=stack,
        context=context,
        num_sequences=n,
        is_full=full,
        budget_bytes=70 * 10**9,
        step_ms=ms,
        p10_ms=ms,
        p90_ms=ms,
        floor_ms=floor_ms,
        floor_parts_ms={},
        steady_ms=ms,
        kernels_ms=ms / 1.25,
        largest_kernels_ms={},
        cache_bytes=1,
        info_bytes=1,
        weight_bytes=1,
        peak_bytes=None,
        experts_chosen=[],
        experts_expected=1.0,
        attention="x",
        attention_ms={},
        clocks=None,
        commit=None,
        date="",
    )


def test_every_case_gives_a_row():
    full = capacity(TINY, GQA, 64, BUDGET)
    assert full == 2
    plan = [*(Case(stack, 64, 2) for stack in STACKS), Case(HYBRID, 64, 0)]
    rows = list(bench().rows(plan))
    assert [type(row) for row in rows] == [DecodeRow] * 3 + [PrefillRow]
    assert [(r.stack, r.is_full) for r in rows[:3]] == [
        (HYBRID, False),
        (ALL_MLA, False),
        (GQA, True),
    ]
    for row in rows[:3]:
        assert row.cache_bytes == row.info_bytes
        assert 0 < row.p10_ms <= row.step_ms <= row.p90_ms
        assert row.floor_ms == pytest.approx(sum(row.floor_parts_ms.values()))
        assert row.steady_ms > 0
        assert row.kernels_ms is None
        assert row.marks == []
    assert rows[2].attention == "torch SDPA"
    assert rows[3].finite
    assert rows[3].floor_s > 0
    assert rows[3].tokens_per_s == pytest.approx(64 / rows[3].seconds)


def test_a_case_that_fails_does_not_take_the_others_along(monkeypatch):
    class Broken(GQAStep):
        def _choose(self, generator):
            raise torch.OutOfMemoryError("too much")

    monkeypatch.setattr(context_run, "GQAStep", Broken)
    plan = [Case(GQA, 64, 2), Case(HYBRID, 64, 2)]
    failed, row = bench().rows(plan)
    assert failed == Failed(plan[0], "OutOfMemoryError: too much")
    assert isinstance(row, DecodeRow)


def test_layers_that_fail_are_made_again_for_the_next_case(monkeypatch):
    make, calls = context_run.random_layers, []

    def once(*args):
        calls.append(args[1])
        if len(calls) == 1:
            raise RuntimeError("no room")
        return make(*args)

    monkeypatch.setattr(context_run, "random_layers", once)
    plan = [Case(ALL_MLA, 64, 2), Case(ALL_MLA, 64, 1), Case(ALL_MLA, 64, 2)]
    rows = list(bench().rows(plan))
    assert [type(row) for row in rows] == [Failed, DecodeRow, DecodeRow]
    assert calls == [ALL_MLA, ALL_MLA]


def test_no_case_begins_too_late():
    plan = [Case(ALL_MLA, 64, 1)]
    (row,) = bench(deadline_s=time.monotonic() - 1).rows(plan)
    assert row == Failed(plan[0], "no time was left to begin it")


def test_outputs_that_are_not_finite_are_marked(monkeypatch):
    make = context_run.random_layers

    def broken(*args):
        layers = make(*args)
        layers[3].block_sparse_moe.shared_experts.down_proj.weight.fill_(torch.nan)
        return layers

    monkeypatch.setattr(context_run, "random_layers", broken)
    (row,) = bench().rows([Case(ALL_MLA, 64, 1)])
    assert row.marks == ["outputs are not finite"]


def test_a_file_keeps_what_was_measured_before(tmp_path):
    path = tmp_path / "contexts.json"
    first, second = measured_row(HYBRID, 64, 2, 4.0, 3.0), measured_row(GQA, 64, 2, 4.0, 3.0)
    for row in (first, second, replace(first, step_ms=5.0)):
        save(path, ENV, row)
    assert load(path).decode == [second, replace(first, step_ms=5.0)]
    with pytest.raises(UnsupportedError, match="cannot be compared"):
        save(path, ENV | {"gpu": "another"}, first)
    path.write_text(json.dumps({"env": {}}))
    with pytest.raises(UnsupportedError, match="no result file of bench contexts"):
        load(path)


ROWS = [
    measured_row(HYBRID, 1 << 20, 57, 30.0, 27.0, full=True),
    measured_row(ALL_MLA, 1 << 20, 14, 25.0, 20.0, full=True),
    measured_row(GQA, 1 << 20, 4, 20.0, 18.0, full=True),
    measured_row(HYBRID, 1 << 20, 4, 5.0, 4.0),
    measured_row(HYBRID, 4096, 4, 2.0, 1.0),
]


def test_ratios_are_of_throughputs():
    over_mla = ratio(ROWS, ALL_MLA, 1 << 20, None)
    assert over_mla.measured == pytest.approx((57 / 30) / (14 / 25))
    assert over_mla.roofline == pytest.approx((57 / 27) / (14 / 20))
    same = ratio(ROWS, GQA, 1 << 20, 4)
    assert same.measured == pytest.approx(20 / 5)
    assert ratio(ROWS, ALL_MLA, 1 << 20, 4) is None
    assert ratio(ROWS, GQA, 4096, None) is None


def test_tables_show_each_row_once():
    table = decode_table(ROWS)
    assert table.count("| 1,048,576 |") == 3
    assert "| 57 | 0.0 GB | 30.00 ms, 30.00 to 30.00 | 1,900 | 90% | 30.00 ms | 1.25 |" in table
    assert decode_table(ROWS, 4).count("\n") == 1 + 3
    assert ratio_table(ROWS).splitlines()[-1] == (
        "| 1,048,576 | 3.39 | 3.02 | 112% | 9.50 | 9.50 | 100% |"
    )
    whole = report(ResultFile(ENV | {"ceilings": RATES._asdict()}, ROWS, []))
    assert "Ceilings: copy 0.01 TB/s" in whole
    assert "4 sequences each" in whole


def test_kernels_that_overlap_count_once():
    ran = [Ran("b", 15, 30), Ran("a", 10, 20), Ran("c", 50, 60), Ran("a", 52, 55)]
    times = summed(ran, 2)
    assert times.busy_s == pytest.approx(30e-6 / 2)
    assert list(times.largest.items()) == [
        ("b", pytest.approx(7.5e-6)),
        ("a", pytest.approx(6.5e-6)),
        ("c", pytest.approx(5e-6)),
    ]
    assert summed([], 2) is None
    assert kernel_times(lambda: None, torch.device("cpu")) is None
