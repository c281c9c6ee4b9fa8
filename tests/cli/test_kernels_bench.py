"""`perilune kernels bench|gate`: what they print, keep and return."""

from __future__ import annotations

import json

import pytest
import torch

from perilune.cli import kernels_bench as command
from perilune.cli.main import main
from perilune.kernels.bench import subject
from perilune.kernels.bench.ceilings import Ceilings
from perilune.kernels.bench.errors import RedOpError
from perilune.kernels.bench.gate import Verdict
from perilune.kernels.bench.results import load
from perilune.kernels.bench.table import markdown

CASE = ("router", "T8_E896_R16")


@pytest.fixture(autouse=True)
def small(monkeypatch):
    """A cache of 64 KiB, so that few copies exceed it."""
    monkeypatch.setattr(subject, "cache_bytes", lambda device: 1 << 16)
    ceilings = Ceilings(1e11, 1e13)
    monkeypatch.setattr(command, "measure_ceilings", lambda device, clock: ceilings)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)


@pytest.fixture
def stored(tmp_path, capsys):
    path = tmp_path / "r.json"
    assert main(["kernels", "bench", "router", "--seconds", "0", "--save", str(path)]) == 0
    return path


def test_bench_prints_and_keeps_a_row_a_case(stored, capsys):
    env, rows = load(stored)
    assert [row.key[:3] for row in rows] == [(*CASE, "cpu")]
    assert env["gpu"].startswith("CPU: ")
    assert env["ceilings"] == {"bytes_per_s": 1e11, "flops_per_s": 1e13}
    assert main(["kernels", "bench", "router", "--seconds", "0"]) == 0
    out = capsys.readouterr().out
    assert "copy 100 GB/s, matmul 10 TFLOP/s" in out
    assert out.rstrip("\n").split("\n")[-1].split()[:3] == [*CASE, "cpu"]


def test_the_reference_can_be_asked_for(capsys):
    argv = ["kernels", "bench", "router", "--seconds", "0", "--backend", "reference"]
    assert main(argv) == 0
    assert "  reference  " in capsys.readouterr().out


def test_a_table_is_made_of_a_file(stored, capsys):
    capsys.readouterr()
    assert main(["kernels", "bench", "--table", str(stored)]) == 0
    assert capsys.readouterr().out == markdown(stored) + "\n"


def test_a_refused_case_is_named_and_fails(monkeypatch, capsys, tmp_path):
    def red(op, backend):
        raise RedOpError(f"{op.name} on {backend}: 1 checks are red")

    monkeypatch.setattr("perilune.kernels.bench.runner.require_green", red)
    path = tmp_path / "r.json"
    assert main(["kernels", "bench", "router", "--save", str(path)]) == 1
    captured = capsys.readouterr()
    assert "refused: router on cpu: 1 checks are red" in captured.err
    assert captured.out.endswith("1 case(s) refused\n")
    assert not path.exists()


@pytest.mark.parametrize(
    ("argv", "error"),
    [
        (["bench", "routers"], "unknown op 'routers'"),
        (["bench", "router", "--case", "none"], "router has no case none for cpu"),
        (["bench", "router", "--case", "T8192_E896_R16"], "no case T8192_E896_R16 for cpu"),
        (["bench", "--table", "nowhere.json"], "nowhere.json: No such file"),
        (["gate", "--against", "nowhere.json"], "nowhere.json: No such file"),
    ],
)
def test_what_is_not_there_is_one_line(argv, error, capsys):
    assert main(["kernels", *argv]) == 1
    err = capsys.readouterr().err
    assert error in err
    assert err.count("\n") == 1


def test_gate_measures_the_stored_cases(stored, capsys):
    capsys.readouterr()
    content = json.loads(stored.read_text())
    content["rows"][0]["median_ms"] *= 1000
    stored.write_text(json.dumps(content))
    main(["kernels", "gate", "--against", str(stored), "--seconds", "0"])
    assert capsys.readouterr().out.startswith("router  T8_E896_R16  cpu: ")
    content["rows"][0]["median_ms"] /= 1e6
    stored.write_text(json.dumps(content))
    assert main(["kernels", "gate", "--against", str(stored), "--seconds", "0"]) == 1


@pytest.mark.parametrize(("ratio", "status"), [(1.0, 0), (1.3, 1)])
def test_gate_fails_where_a_verdict_does(stored, capsys, monkeypatch, ratio, status):
    capsys.readouterr()
    verdict = Verdict(*CASE, "cpu", 1.0, ratio, 0.05)
    monkeypatch.setattr(command, "judge", lambda *args: iter([verdict]))
    assert main(["kernels", "gate", "--against", str(stored)]) == status
    assert capsys.readouterr().out == f"{verdict}\n"


def test_gate_refuses_another_machine_and_an_op_that_is_not_stored(stored, capsys):
    assert main(["kernels", "gate", "situ", "--against", str(stored)]) == 1
    assert "holds no case of situ" in capsys.readouterr().err
    content = json.loads(stored.read_text())
    content["env"]["gpu"] = "NVIDIA H200"
    stored.write_text(json.dumps(content))
    assert main(["kernels", "gate", "--against", str(stored)]) == 1
    assert "was measured with gpu 'NVIDIA H200'" in capsys.readouterr().err


def test_gate_needs_a_file(capsys):
    with pytest.raises(SystemExit) as stop:
        main(["kernels", "gate"])
    assert stop.value.code == 2


@pytest.mark.parametrize("seconds", ["-1", "nan", "inf", "x"])
def test_a_wrong_time_is_a_usage_error(seconds, capsys):
    with pytest.raises(SystemExit) as stop:
        main(["kernels", "bench", f"--seconds={seconds}"])
    assert stop.value.code == 2
    assert "must be a number of seconds" in capsys.readouterr().err
