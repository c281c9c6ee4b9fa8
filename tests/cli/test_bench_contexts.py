"""`perilune bench contexts`: options, what it prints and keeps, and that torch alone is enough."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

from perilune.cli import bench_contexts
from perilune.cli.main import main
from perilune.kernels.bench.ceilings import Ceilings
from perilune.model.contexts.plan import Case
from perilune.model.parse_config import parse_config
from perilune.model.presets import preset, tiny_k3

TINY = ("--model", "tiny-k3", "--contexts", "64", "--batch", "2", "--cache-gb", "0.003")


@pytest.fixture(autouse=True)
def toy(monkeypatch):
    """No time for ceilings, and another tiny model: one with the layers that are wanted."""
    tiny = {"tiny-k3": parse_config(tiny_k3(num_hidden_layers=8))}
    monkeypatch.setattr(bench_contexts, "preset", lambda name: tiny.get(name) or preset(name))
    monkeypatch.setattr(bench_contexts, "measure_ceilings", lambda *_: Ceilings(1e10, 1e11))


def test_names_of_the_cases(capsys):
    assert main(["bench", "contexts", "--list", "--cases", "*_L1048576_*"]) == 0
    assert capsys.readouterr().out.split() == [
        "hybrid_L1048576_N57",
        "hybrid_L1048576_N4",
        "mla_L1048576_N14",
        "mla_L1048576_N4",
        "gqa_L1048576_N4",
        "hybrid_L1048576_prefill",
    ]


def test_rows_are_kept_and_shown(tmp_path, capsys):
    path = tmp_path / "contexts.json"
    argv = ["bench", "contexts", *TINY, "--unchecked", "--seconds", "0.001", "--save", str(path)]
    assert main([*argv, "--cases", "mla_*_N2,*_prefill"]) == 0
    out, err = capsys.readouterr()
    content = json.loads(path.read_text())
    (row,) = content["decode"]
    assert (row["stack"], row["context"], row["num_sequences"]) == ("mla", 64, 2)
    assert row["cache_bytes"] == row["info_bytes"]
    assert row["marks"] == ["ops not checked in this run"]
    assert len(content["prefill"]) == 1
    assert content["env"]["model"] == "tiny-k3"
    assert "mla 64 x 2: " in err
    assert "2 sequences each" not in out
    assert "Prefill of one sequence in chunks" in out
    assert main(["bench", "contexts", "--table", str(path)]) == 0
    assert capsys.readouterr().out == out


def test_ops_are_checked_first(monkeypatch, capsys):
    checked = []
    monkeypatch.setattr(bench_contexts, "require_green_ops", lambda *args: checked.append(args))
    argv = ["bench", "contexts", *TINY, "--limit", "1e-9", "--cases", "gqa_L64_N2"]
    assert main(argv) == 1
    assert checked[0][1] == [Case("gqa", 64, 2)]
    assert "gqa_L64_N2: failed: no time was left to begin it" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["--cases", "none"], "no case matches none"),
        (["--model", "tiny-kimi-linear"], "no three KDA layers"),
        (["--model", "none"], "unknown model"),
        (["--contexts", "0"], "must be positive"),
        (["--cache-gb", "-1"], "not a number above 0"),
        ([], "need a GPU with 140 GB"),
    ],
)
def test_wrong_usage_is_told(capsys, argv, message):
    try:
        code = main(["bench", "contexts", *argv])
    except SystemExit as error:
        code = error.code
    assert code in (1, 2)
    assert message in capsys.readouterr().err


def test_torch_alone_is_enough():
    """A GPU machine need not have what the server needs."""
    missing = "uvloop aiohttp granian prometheus_client tiktoken tqdm llguidance tokenizers"
    script = (
        f"import sys; sys.modules.update(dict.fromkeys({missing.split()}));"
        "sys.argv = ['contexts', '--list'];"
        "from perilune.cli.bench_contexts import main; sys.exit(main())"
    )
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, timeout=60, check=True
    )
    assert "hybrid_L1048576_N57" in done.stdout
