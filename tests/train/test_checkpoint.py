"""The training state: a foreign or damaged one is refused, and a crash keeps the old one."""

import json
import signal
import subprocess
import sys
from dataclasses import asdict, replace
from itertools import pairwise

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from perilune.core.errors import CheckpointError
from perilune.model.presets import tiny_k3
from perilune.train.checkpoint import Progress, latest, load_state, read_progress, save_state
from perilune.train.loop import build_model, open_loader
from perilune.train.optim import build_optimizers
from perilune.train.pieces import PIECES, PieceFiles, Region, metadata_of
from perilune.train.step import DeviceBatch, Stepper

CRASH = """
import os, signal, sys
from pathlib import Path
from perilune.model.parse_config import parse_config
from perilune.model.model import Transformer
from perilune.model.presets import tiny_k3
from perilune.train import checkpoint

left = int(sys.argv[2])

def killed(path):
    global left
    left -= 1
    if left == 0:
        if path.is_file():
            path.write_bytes(path.read_bytes()[:1000])  # as lost power would leave it
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
    Stepper(model, optimizers, replace(tiny_run, steps=10))(0, batch)
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
    path = latest(tmp_path) / "rank-0.safetensors"
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
    path = latest(tmp_path) / "rank-0.safetensors"
    save_file(load_file(path), path, metadata=metadata)
    with pytest.raises(CheckpointError, match=f"state-00000001 is no state of a run: .*{problem}"):
        read_progress(tmp_path)


@pytest.mark.parametrize(
    ("syncs", "step", "left"),
    [
        (1, 1, {"state-00000001", "state-00000002.partial"}),  # a file is written
        (2, 1, {"state-00000001", "state-00000002.partial"}),  # all files are
        (3, 2, {"state-00000001", "state-00000002"}),  # the folder has its name
    ],
)
def test_a_kill_in_the_middle_of_a_save_leaves_a_whole_state(stepped, tmp_path, syncs, step, left):
    argv = [sys.executable, "-c", CRASH, str(tmp_path), str(syncs)]
    done = subprocess.run(argv, capture_output=True)
    assert done.returncode == -signal.SIGKILL, done.stderr.decode()
    assert {path.name for path in tmp_path.glob("state-*")} == left
    assert read_progress(tmp_path).step == step
    load_state(tmp_path, stepped[0], stepped[1])
    save_state(tmp_path, stepped[0], stepped[1], replace(PROGRESS, step=3))
    assert read_progress(tmp_path).step == 3
    assert [path.name for path in tmp_path.glob("state-*")] == ["state-00000003"]


def test_a_lost_file_is_told(stepped, tmp_path):
    """As if another rank's file had not been copied with this one."""
    path = latest(tmp_path) / "rank-0.safetensors"
    with safe_open(path, framework="pt") as file:
        tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
        progress = file.metadata()["progress"]
    name = "model.model.embed_tokens.weight"
    whole = tuple(tensors[name].shape)
    half = Region(whole, (0, 0), (whole[0] // 2, whole[1]))
    tensors[name] = tensors[name][: whole[0] // 2].clone()
    save_file(tensors, path, {"progress": progress, PIECES: metadata_of({name: half})})
    with pytest.raises(CheckpointError, match=f"pieces of {name} are missing"):
        load_state(tmp_path, *stepped)


@given(st.data())
@settings(max_examples=60)
def test_any_block_is_read_from_any_pieces(tmp_path_factory, data):
    """A tensor cut along one dimension or two; a block of it that lies anywhere."""
    folder = tmp_path_factory.mktemp("pieces")
    x = torch.arange(5 * 7).view(5, 7)
    cuts = [sorted({0, size, *data.draw(st.lists(st.integers(0, size)))}) for size in (5, 7)]
    blocks = [(a, b) for a in pairwise(cuts[0]) for b in pairwise(cuts[1])]
    for rank, ((top, bottom), (left, right)) in enumerate(blocks):
        region = Region((5, 7), (top, left), (bottom - top, right - left))
        piece = x[top:bottom, left:right].contiguous()
        path = folder / f"rank-{rank}.safetensors"
        save_file({"x": piece}, path, {PIECES: metadata_of({"x": region})})
    top, left = data.draw(st.integers(0, 4)), data.draw(st.integers(0, 6))
    height, width = data.draw(st.integers(0, 5 - top)), data.draw(st.integers(0, 7 - left))
    with PieceFiles(folder) as files:
        assert files.shape("x") == (5, 7)
        block = files.read("x", Region((5, 7), (top, left), (height, width)))
    assert torch.equal(block, x[top : top + height, left : left + width])
