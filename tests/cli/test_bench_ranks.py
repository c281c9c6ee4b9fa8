"""`perilune bench ranks`: what it prints and keeps, and what it refuses."""

from __future__ import annotations

import json

import pytest

from perilune.cli import bench_ranks
from perilune.cli.bench_ranks import UNCHECKED, UNEQUAL
from perilune.cli.main import main
from perilune.kernels.bench.results import load
from perilune.kernels.bench.rounds import Spread
from perilune.model.rank_bench import Case, Measured, Times
from perilune.model.rank_pairs import Equality

TINY = ("--model", "tiny-k3", "--batch", "2", "--context", "70", "--rounds", "2")


def test_rows_are_kept_and_shown(tmp_path, capfd):
    path = tmp_path / "ranks.json"
    assert main(["bench", "ranks", *TINY, "--unchecked", "--save", str(path)]) == 0
    out, err = capfd.readouterr()
    env, rows = load(path)
    assert (env["model"], env["ranks"]) == ("tiny-k3", 2)
    assert [row.case for row in rows] == [
        "KDA_B2",
        "KDA_B2 attention [2, 64]",
        "KDA_B2 experts [2, 96]",
        "MLA_B2",
        "MLA_B2 attention [2, 64]",
        "MLA_B2 experts [2, 96]",
        "head_B2",
        "head_B2 logits [2, 128]",
    ]
    for row in rows:
        assert row.case in out
        assert 0 < row.p10_ms <= row.median_ms <= row.p90_ms
        assert (row.op, row.backend) == ("ranks", "cpu x2")
        if row.peer == "one GPU":
            assert {UNCHECKED, "ranks alike to the bit"} <= {*row.marks}
            assert row.floor_ms > sum(
                joint.median_ms for joint in rows if joint.case.startswith(f"{row.case} ")
            )
    assert "KDA_B2: " in err
    assert err.count("; equal\n") == 3
    assert json.loads(path.read_text())["rows"][0]["case"] == "KDA_B2"


@pytest.mark.parametrize("rerouted", [0, 3])
def test_what_differs_is_said(rerouted):
    times = Times(*[Spread(1.0, 1.0, 1.0)] * 2, [], 1.0)
    equality = {"float32": Equality(0.5, True), "bfloat16": Equality(0.01, True, rerouted)}
    measured = Measured(case=Case("KDA_B1", 1, 1), equality=equality, times=times, equal=False)
    marks = bench_ranks._marks(measured)
    assert marks[:2] == ["from one GPU 5.0e-01 in float32, 1.0e-02 in bfloat16", UNEQUAL]
    assert len(marks) == 2 + bool(rerouted)


def test_a_model_that_cannot_be_shared_is_refused_at_once(capsys):
    assert main(["bench", "ranks", "--model", "nano"]) != 0
    assert "2 ranks cannot have equal parts of 5 (KDA heads)" in capsys.readouterr().err
