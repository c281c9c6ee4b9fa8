"""The toy recipe, from making its text to its last step, repeats its committed losses.

`make test ARGS="tests/train/test_golden_losses.py --write-golden"` writes the file anew.
"""

import json
import os
import platform
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from perilune.train.run_log import read_metrics

ROOT = Path(__file__).parents[2]
GOLDEN = ROOT / "tests" / "golden" / "losses_nano_toy.json"
COMMAND = (
    "train nano-toy --steps 12 --set rows=2 --set row_len=128 --set eval_every=0"
    " --set optim.warmup_steps=2 --set save_every=5"
)
ENVIRONMENT = {"OMP_NUM_THREADS": "1", "ATEN_CPU_CAPABILITY": "default", "MKL_CBWR": "COMPATIBLE"}
WHERE = (
    "One thread and the instructions that all x86-64 processors have, as the environment says, so "
    "that the model of the processor does not matter. Another version of torch, or another "
    "architecture, may round differently: there the losses are compared to one part in a thousand."
)
KEYS = ("step", "loss", "grad_norm", "lr", "max_violation")


def run(folder, *more):
    command = [sys.executable, "-m", "perilune.cli.main", *COMMAND.split(), *more]
    environment = {**os.environ, **ENVIRONMENT, "PYTHONPATH": str(ROOT / "src")}
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    lines = read_metrics(folder / "runs" / "nano-toy" / "metrics.jsonl")
    return [{key: line[key] for key in KEYS} for line in lines]


@pytest.fixture
def clone(tmp_path):
    (tmp_path / "models").symlink_to(ROOT / "models")
    return tmp_path


def test_the_losses_are_the_committed_ones(clone, request):
    stopped = run(clone, "--stop-after-minutes", "0")
    assert [line["step"] for line in stopped] == [1]
    found = run(clone, "--resume")  # from the state of step 1: a resumed run counts as any other
    here = {"torch": torch.__version__.partition("+")[0], "machine": platform.machine()}
    if request.config.getoption("write_golden"):
        golden = {"command": f"perilune {COMMAND}", "environment": ENVIRONMENT, "where": WHERE}
        lines = ",\n  ".join(map(json.dumps, found))
        head = json.dumps(golden | here, indent=1).removesuffix("\n}")
        GOLDEN.write_text(f'{head},\n "steps": [\n  {lines}\n ]\n}}\n', encoding="utf-8")
    golden = json.loads(GOLDEN.read_text(encoding="utf-8"))
    assert golden["command"] == f"perilune {COMMAND}"
    assert golden["environment"] == ENVIRONMENT
    if here == {key: golden[key] for key in here}:
        assert found == golden["steps"], "if numbers were meant to change: --write-golden"
    else:
        losses = [[line["loss"] for line in lines] for lines in (found, golden["steps"])]
        assert losses[0] == pytest.approx(losses[1], rel=1e-3)
