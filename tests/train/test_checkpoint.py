"""The training state: a foreign or damaged one is refused, and a crash keeps the old one."""

import json
import signal
import subprocess
import sys
from dataclasses import asdict, replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from perilune.core.errors import CheckpointError
from perilune.model.presets import tiny_k3
from perilune.train.checkpoint import FILE, Progress, load_state, read_progress, save_state
from perilune.train.loop import build_model, open_loader
from perilune.train.optim import build_optimizers
from perilune.train.step import DeviceBatch, Stepper

CRASH = """
import os, signal, sys
from pathlib import Path
from perilune.model.parse_config import parse_config
from perilune.model.model import Transformer
from perilune.model.presets import tiny_k3
from perilune.train import checkpoint

def killed(path):
    path.write_bytes(path.read_bytes()[:1000])  # as a full disk or a lost power would leave it
    os.kill(os.getpid(), signal.SIGKILL)

checkpoint._sync = killed
model = Transformer(parse_config(tiny_k3(mxfp4=True, dtype="float32", num_hidden_layers=4)))
cursor = {"streams": {}, "pool": [], "next_age": 0}
progress = checkpoint.Progress(step=2, seconds=1.0, loader=cursor, recipe={})
checkpoint.save_state(Path(sys.argv[1]), model, [], progress)
"""

PROGRESS = Progress(
    step=1,
    seconds=2.5,
    loader={"streams": {"a": (0, 1, 7)}, "pool": [(0, "a", 0, 4, True)], "next_age": 1},
    recipe={"name": "tiny", "steps": 10},
)


@pytest.fixture
def stepped(tiny_run, tmp_path):
    """A model and its optimisers after one step, saved in `tmp_path`."""
    model = build_model(tiny_run)
    optimizers = build_optimizers(model, tiny_run.optim)
    batch = DeviceBatch.of(next(open_loader(tiny_run)), "cpu")
    Stepper(model, optimizers, tiny_run.optim, 10)(0, batch)
    save_state(tmp_path, model, optimizers, PROGRESS)
    return model, optimizers


def test_everything_comes_back(stepped, tiny_run, tmp_path):
    model, optimizers = stepped
    fresh = build_model(replace(tiny_run, seed=9))
    fresh_optimizers = build_optimizers(fresh, tiny_run.optim)
    load_state(tmp_path, fresh, fresh_optimizers)
    assert read_progress(tmp_path) == PROGRESS
    for name, value in model.state_dict().items():
        assert torch.equal(fresh.state_dict()[name], value), name
    for old, new in zip(optimizers, fresh_optimizers, strict=True):
        old_state, new_state = old.state_dict()["state"], new.state_dict()["state"]
        assert old_state.keys() == new_state.keys()
        assert old_state
        for number, values in old_state.items():
            for name, value in values.items():
                assert torch.equal(new_state[number][name], value), (number, name)


@pytest.mark.parametrize(
    ("options", "problem"),
    [
        ({"num_hidden_layers": 5}, r"model\.layers\.4\.\S+ is missing"),
        ({"num_hidden_layers": 3}, r"model\.layers\.\d\.\S+ is not in this model"),
        ({"num_hidden_layers": 4, "intermediate_size": 64}, r"is \[96, 64\], not \[64, 64\]"),
    ],
)
def test_a_state_of_another_model_is_refused(stepped, tiny_run, tmp_path, options, problem):
    other = build_model(replace(tiny_run, model=tiny_k3(mxfp4=True, dtype="float32", **options)))
    with pytest.raises(CheckpointError, match=f"belongs to another model: .*{problem}"):
        load_state(tmp_path, other, [])


def test_a_damaged_state_is_refused(stepped, tmp_path):
    path = tmp_path / FILE
    path.write_bytes(path.read_bytes()[:-100])
    with pytest.raises(CheckpointError, match="is damaged"):
        load_state(tmp_path, stepped[0], [])


def progress_json(without=None, **changes):
    values = json.loads(json.dumps(asdict(PROGRESS))) | changes
    return json.dumps({key: value for key, value in values.items() if key != without})


@pytest.mark.parametrize(
    ("metadata", "problem"),
    [
        (None, "its metadata has no `progress`"),
        ({"format": "pt"}, "its metadata has no `progress`"),
        ({"progress": progress_json(without="recipe")}, "required field `recipe`"),
        ({"progress": progress_json(without="loader")}, "required field `loader`"),
        ({"progress": progress_json(loader={"streams": {}, "pool": []})}, "field `next_age`"),
        ({"progress": progress_json(step="1")}, r"Expected `int`, got `str` - at `\$\.step`"),
        ({"progress": "{"}, "Input data was truncated"),
    ],
)
def test_a_state_that_does_not_tell_its_progress_is_refused(stepped, tmp_path, metadata, problem):
    path = tmp_path / FILE
    save_file(load_file(path), path, metadata=metadata)
    with pytest.raises(CheckpointError, match=f"{FILE} is no state of a run: .*{problem}"):
        read_progress(tmp_path)


def test_a_kill_in_the_middle_of_a_save_keeps_the_state_before(stepped, tmp_path):
    before = (tmp_path / FILE).read_bytes()
    done = subprocess.run([sys.executable, "-c", CRASH, str(tmp_path)], capture_output=True)
    assert done.returncode == -signal.SIGKILL, done.stderr.decode()
    assert (tmp_path / (FILE + ".partial")).stat().st_size == 1000
    assert (tmp_path / FILE).read_bytes() == before
    load_state(tmp_path, stepped[0], stepped[1])
    assert read_progress(tmp_path) == PROGRESS
    save_state(tmp_path, stepped[0], stepped[1], replace(PROGRESS, step=3))
    assert read_progress(tmp_path).step == 3
    assert [path.name for path in Path(tmp_path).glob("*.safetensors*")] == [FILE]
