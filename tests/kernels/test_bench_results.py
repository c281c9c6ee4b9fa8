"""Result files: their format, what is kept, what may be compared, and the table made of them."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

import pytest
import torch

from perilune.cli import kernels_layer
from perilune.core.errors import UnsupportedError
from perilune.kernels.bench import environment as env_module
from perilune.kernels.bench.cases import Work, bench
from perilune.kernels.bench.ceilings import Ceilings, measure_ceilings
from perilune.kernels.bench.contender import Contender
from perilune.kernels.bench.environment import environment, require_comparable
from perilune.kernels.bench.errors import ImpossibleTimeError
from perilune.kernels.bench.floors import data_sheet, floor, is_suspicious
from perilune.kernels.bench.gpu_state import GpuState, Sampler, parse, summary
from perilune.kernels.bench.results import Row, default_path, load, save
from perilune.kernels.bench.rounds import Settings, measure, spread
from perilune.kernels.bench.stopwatch import CpuStopwatch, Reading, agree
from perilune.kernels.bench.table import markdown, plain
from perilune.kernels.registry import OPS

ENV = {
    "gpu": "NVIDIA H200",
    "driver": "580.1",
    "torch": "2.13.0",
    "triton": "3.9.0",
    "peers": {"fla-core": "0.6.0", "flash_kda": "not installed"},
    "commit": "abc",
    "date": "2026-12-03",
}
REQUIRED = [
    *("op", "case", "backend", "median_ms", "p10_ms", "p90_ms"),
    *("floor_ms", "peer", "peer_median_ms", "ratio"),
]


def row(**changes) -> Row:
    times = {"median_ms": 2.0, "p10_ms": 1.9, "p90_ms": 2.25, "floor_ms": 0.5}
    names = {"op": "kda_chunk", "case": "T8192_H96", "backend": "cuda"}
    return Row(**(names | times | changes))


def test_a_file_holds_env_and_rows_with_the_agreed_keys(tmp_path):
    path = tmp_path / "deep" / "r.json"
    save(path, ENV, [row(peer="FlashKDA", peer_median_ms=3.0, ratio=1.5)])
    content = json.loads(path.read_text())
    assert content["env"] == ENV
    assert set(REQUIRED) <= set(content["rows"][0])
    assert list(content["rows"][0])[: len(REQUIRED)] == REQUIRED
    assert load(path).rows == [row(peer="FlashKDA", peer_median_ms=3.0, ratio=1.5)]


def test_a_second_run_replaces_its_own_cases_and_keeps_the_others(tmp_path):
    path = tmp_path / "r.json"
    save(path, ENV, [row(peer="a"), row(peer="b"), row(case="other")])
    save(path, ENV, [row(peer="a", median_ms=1.0)])
    assert [(r.case, r.peer, r.median_ms) for r in load(path).rows] == [
        ("other", None, 2.0),
        ("T8192_H96", "a", 1.0),
    ]


def test_parts_that_a_case_has_no_more_go_with_it(tmp_path):
    path = tmp_path / "r.json"
    parts = ["L_B1", "L_B1 01 linear", "L_B1 02 situ", "L_B12", "L_B12 01 linear"]
    save(path, ENV, [row(op="layer", case=case) for case in parts])
    save(path, ENV, [row(op="layer", case=case) for case in ("L_B1", "L_B1 01 gate")])
    assert [r.case for r in load(path).rows] == ["L_B12", "L_B12 01 linear", "L_B1", "L_B1 01 gate"]


def test_no_case_looks_like_a_part():
    cases = [*(case for op in OPS for case in bench(op).cases), *kernels_layer.CASES]
    assert [case for case in [*cases, kernels_layer.STACK] if " " in case] == []


def test_peers_of_another_op_stay_named(tmp_path):
    path = tmp_path / "r.json"
    save(path, ENV | {"peers": {"flash_kda": "0.0.1", "fla-core": "0.5"}}, [row()])
    save(path, ENV | {"peers": {"fla-core": "0.6"}}, [row(op="kda_step")])
    assert load(path).env["peers"] == {"flash_kda": "0.0.1", "fla-core": "0.6"}


@pytest.mark.parametrize("key", ["gpu", "driver", "triton"])
def test_other_hardware_or_compilers_are_not_mixed_nor_compared(tmp_path, key):
    path = tmp_path / "r.json"
    save(path, ENV, [row()])
    other = ENV | {key: "other"}
    with pytest.raises(UnsupportedError, match=rf"measured with {key} .* here it is 'other'"):
        save(path, other, [row()])
    with pytest.raises(UnsupportedError, match="cannot be compared"):
        require_comparable(load(path).env, other, path)
    assert load(path).env == ENV


def test_another_torch_or_commit_may_be_compared(tmp_path):
    require_comparable(ENV, ENV | {"torch": "2.14", "commit": "def"}, tmp_path)


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"env": {}, "rows": [{}]}', '{"rows": 3}'])
def test_a_file_of_another_format_is_refused(tmp_path, text):
    path = tmp_path / "r.json"
    path.write_text(text)
    with pytest.raises(UnsupportedError, match="no result file of kernels bench"):
        load(path)


def test_files_are_named_for_gpu_and_month():
    folder = Path("results")
    assert default_path(ENV, folder) == folder / "kernels_h200_202612.json"
    cpu = ENV | {"gpu": "CPU: AMD EPYC, 2 thread(s)"}
    assert default_path(cpu, folder) == folder / "kernels_cpu_202612.json"


def test_the_table_shows_every_row_and_where_it_was_measured(tmp_path):
    path = tmp_path / "r.json"
    rows = [
        row(peer="FlashKDA", peer_median_ms=3.0, ratio=1.5),
        row(peer="fla", peer_note="not installed"),
        row(case="N1", eager_ms=0.031, marks=["clock moved: SM 1500-1980 MHz"]),
    ]
    save(path, ENV, rows)
    head, blank, columns, dashes, *lines = markdown(path).split("\n")
    assert head == (
        "NVIDIA H200, driver 580.1, triton 3.9.0, torch 2.13.0, fla-core 0.6.0,"
        " flash_kda not installed, commit abc, 2026-12-03"
    )
    assert blank == ""
    assert columns.count("|") == dashes.count("|")
    assert lines[0] == (
        "| kda_chunk | T8192_H96 | cuda | 2 | 1.9-2.25 | 0.5 | 4.0 | FlashKDA | 3 | 1.50 |  |"
    )
    assert lines[1].endswith("| fla |  |  | peer not installed |")
    assert "in a graph; eager 0.031 ms; clock moved: SM 1500-1980 MHz" in lines[2]
    assert plain(rows).count("\n") == 3


def test_the_environment_names_the_cpu_and_its_threads():
    env = environment(torch.device("cpu"), {"fla-core": "not installed"}, "given")
    assert env["gpu"].startswith("CPU: ")
    assert f"{torch.get_num_threads()} thread(s)" in env["gpu"]
    assert env["driver"] is None
    assert env["commit"] == "given"
    assert set(ENV) <= set(env)


def test_a_hook_does_not_name_the_commit(monkeypatch, tmp_path):
    before = env_module.head_commit()
    monkeypatch.setenv("GIT_DIR", str(tmp_path))
    assert env_module.head_commit() == before


def test_floors_take_the_slower_of_bytes_and_flops():
    rates = Ceilings(bytes_per_s=100.0, flops_per_s=1000.0)
    assert floor(Work(50, 100), rates, rates).measured_s == 0.5
    assert floor(Work(50, 900), rates, rates).measured_s == 0.9


def test_an_h200_is_judged_by_its_data_sheet_and_others_by_what_they_showed():
    measured = Ceilings(4.269e12, 679e12)
    sheet = data_sheet("NVIDIA H200", "cuda", measured)
    limits = floor(Work(int(1e9), 0), sheet, measured)
    assert limits.impossible_s == pytest.approx(1e9 / 4.8e12)
    assert is_suspicious(1e9 / 4.5e12, limits, "x")
    assert not is_suspicious(1e9 / 4.2e12, limits, "x")
    with pytest.raises(ImpossibleTimeError, match=r"x: 0\.2 ms is below 0\.2083 ms"):
        is_suspicious(1e9 / 5e12, limits, "x")
    assert data_sheet("Card", "cuda", measured).bytes_per_s == 1.5 * measured.bytes_per_s


def test_ceilings_are_positive(monkeypatch):
    monkeypatch.setattr("perilune.kernels.bench.ceilings.cache_bytes", lambda device: 1 << 18)
    monkeypatch.setattr("perilune.kernels.bench.ceilings.MATMUL_SIZE", {"cpu": 64})
    ceilings = measure_ceilings(torch.device("cpu"), CpuStopwatch())
    assert min(ceilings) > 0


def test_contenders_take_turns_and_every_round_has_new_values():
    calls: list[str] = []

    class Counted:
        slack_s = 0.0

        def time(self, run):
            run()
            return Reading(1.0, 1.0)

    def contender(name):
        return Contender(name, [lambda: calls.append(name)])

    settings = Settings(min_rounds=4, max_rounds=4)
    measured = measure(
        [contender("A"), contender("B")], lambda: calls.append("new"), Counted(), settings
    )
    assert "".join(calls) == "newAABBnewABAnewBAnewABAnewBA"
    assert measured.repeat == 1
    assert [s.median for s in measured.spreads] == [1, 1]


@pytest.mark.parametrize(("seconds", "rounds"), [(0.1, 10), (1.0, 5)])
def test_long_rounds_are_fewer(seconds, rounds):
    new = []

    class Slow:
        slack_s = 0.0

        def time(self, run):
            run()
            return Reading(seconds, seconds)

    measure([Contender("a", [list])], lambda: new.append(0), Slow(), Settings(seconds=0))
    assert len(new) == 1 + rounds


def test_work_that_only_the_second_clock_sees_is_refused():
    class Blind:
        """Device events of one stream, while the work runs on another."""

        slack_s = 1e-3

        def time(self, run):
            run()
            return Reading(0.1, 1.0)

    with pytest.raises(ImpossibleTimeError, match="100 ms by the timer and 1000 ms"):
        measure([Contender("a", [lambda: None])], lambda: None, Blind(), Settings(seconds=0))


def test_clocks_agree_within_their_slack():
    assert agree(Reading(1.0, 1.04), 0.0)
    assert not agree(Reading(1.0, 1.2), 0.01)
    assert agree(Reading(1.0, 1.2), 0.2)
    assert not agree(Reading(1.2, 1.0), 0.01)


def test_a_spread_is_median_and_tenths():
    assert spread([float(i) for i in range(11)]) == (5, 1, 9)


def test_lines_of_the_driver_are_read_and_a_moved_clock_is_seen():
    states = parse("1980, 3201, 512.25, 45\n[N/A], 3201, 1, 2\n1755, 3201, 690.00, 61\n\n")
    assert states == [GpuState(1980, 3201, 512.25, 45), GpuState(1755, 3201, 690, 61)]
    clocks = summary(states)
    assert clocks is not None
    assert clocks.moved
    assert str(clocks) == "SM 1755-1980 MHz"
    steady = summary(parse("1980, 3201, 1, 2\n1965, 3201, 1, 2"))
    assert steady is not None
    assert not steady.moved
    assert summary([]) is None


def test_the_gpu_is_watched_by_a_process_that_ends(tmp_path, monkeypatch):
    script = tmp_path / "smi"
    script.write_text(
        f"#!{sys.executable}\nimport os, sys, time\n"
        "print('1980, 3201, 500, 40', flush=True)\n"
        f"with open({str(tmp_path / 'part')!r}, 'w') as file: file.write(' '.join(sys.argv))\n"
        f"os.rename({str(tmp_path / 'part')!r}, {str(tmp_path / 'asked')!r})\n"
        "time.sleep(60)\n"
    )
    script.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    with Sampler("GPU-1", "smi") as sampler:
        while not (tmp_path / "asked").exists():
            pass
    assert sampler.states == [GpuState(1980, 3201, 500, 40)]
    assert "clocks.sm,clocks.mem,power.draw,temperature.gpu" in (tmp_path / "asked").read_text()


def test_without_the_driver_s_tool_nothing_is_seen():
    with Sampler("GPU-1", "no-such-tool") as sampler:
        pass
    assert sampler.states == []
