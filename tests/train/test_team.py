"""Several processes train the model that one trains; their state moves between numbers of ranks."""

import pickle
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from perilune.core.errors import ConfigError
from perilune.train import checkpoint
from perilune.train.loop import build_model, open_loader, train
from perilune.train.run_facts import read_facts
from perilune.train.run_log import CLOCKED, read_metrics
from perilune.train.step import DeviceBatch, batch_loss

WORKER = """
import pickle, sys
from pathlib import Path
import torch
from perilune.train.loop import train
torch.set_num_threads(1)
config, options = pickle.loads(Path(sys.argv[1]).read_bytes())
train(config, **options)
"""


def train_on(ranks, config, tmp_path, **options):
    """`train` in as many processes as torchrun would start it."""
    (tmp_path / "worker.py").write_text(WORKER)
    (tmp_path / "call").write_bytes(pickle.dumps((config, options)))
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    worker = [str(tmp_path / "worker.py"), str(tmp_path / "call")]
    command = [*launcher, "--nproc-per-node", str(ranks), *worker]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def metrics(config):
    return read_metrics(Path(config.out_dir) / "metrics.jsonl")


def assert_equal_runs(one, two):
    """Losses and validations to 1e-5, every step of them; the same balance; the same weights."""
    lines = metrics(one), metrics(two)
    assert [m["step"] for m in lines[0]] == [m["step"] for m in lines[1]]
    for a, b in zip(*lines, strict=True):
        for key in a.keys() & {"loss", "bpb/prose"}:
            assert b[key] == pytest.approx(a[key], rel=1e-5), (a["step"], key)
        assert a.get("max_violation") == b.get("max_violation"), a["step"]
    models = [load_file(Path(run.out_dir) / "model" / "model.safetensors") for run in (one, two)]
    assert models[0].keys() == models[1].keys()
    for name in ("model.embed_tokens.weight", "lm_head.weight"):
        found = [next(m[key] for key in m if key.endswith(name)) for m in models]
        torch.testing.assert_close(found[1], found[0], rtol=1e-3, atol=1e-4)


@pytest.fixture
def alone(tiny_run):
    config = replace(tiny_run, out_dir=tiny_run.out_dir + "-alone")
    train(config)
    return config


def test_two_ranks_equal_one_and_resume_to_the_same_bits(alone, tiny_run, tmp_path):
    train_on(2, tiny_run, tmp_path)
    assert_equal_runs(alone, tiny_run)
    assert read_facts(Path(tiny_run.out_dir)).ranks == 2

    pieces = replace(tiny_run, out_dir=tiny_run.out_dir + "-pieces")
    train_on(2, pieces, tmp_path, stop_after_s=0)
    train_on(2, pieces, tmp_path, resume=True)
    states = [checkpoint.latest(Path(run.out_dir)) for run in (tiny_run, pieces)]
    for rank in range(2):
        one, two = (load_file(state / f"rank-{rank}.safetensors") for state in states)
        assert one.keys() == two.keys()
        assert all(torch.equal(value, two[name]) for name, value in one.items())


def test_two_ranks_with_half_of_the_experts_each_equal_one(alone, tiny_run, tmp_path):
    config = replace(tiny_run, expert_ranks=2, micro_batches=2, recompute=True)
    train_on(2, config, tmp_path)
    assert_equal_runs(alone, config)


def test_a_state_of_four_ranks_goes_on_with_one(alone, tiny_run, tmp_path):
    """Experts lie on two of the four each, and each of them is cut in two."""
    train_on(4, replace(tiny_run, expert_ranks=2), tmp_path, stop_after_s=0)
    state = checkpoint.latest(Path(tiny_run.out_dir))
    assert len(list(state.iterdir())) == 4
    train(tiny_run, resume=True)
    assert_equal_runs(alone, tiny_run)


def test_recomputed_layers_change_no_bit(alone, tiny_run):
    """Nor what is counted: every token once."""
    config = replace(tiny_run, recompute=True)
    train(config)
    files = [checkpoint.latest(Path(c.out_dir)) / "rank-0.safetensors" for c in (alone, config)]
    one, two = map(load_file, files)
    assert all(torch.equal(value, two[name]) for name, value in one.items())
    lines = [[m | dict.fromkeys(CLOCKED) for m in metrics(run)] for run in (alone, config)]
    assert lines[0] == lines[1]


def test_recomputed_layers_are_forgotten(tiny_run):
    """Less is kept for the backward pass: otherwise nothing was recomputed."""
    kept = []
    for config in (tiny_run, replace(tiny_run, recompute=True)):
        model, batch = build_model(config), DeviceBatch.of(next(open_loader(config)), "cpu")
        sizes = []

        def pack(x, sizes=sizes):
            sizes.append(x.numel())
            return x

        with torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x):
            batch_loss(model, batch)
        kept.append(sum(sizes))
    assert kept[1] < 0.3 * kept[0]


def test_micro_batches_equal_one(alone, tiny_run):
    config = replace(tiny_run, micro_batches=4)
    train(config)
    assert_equal_runs(alone, config)


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        ({"micro_batches": 3}, "4 rows are no equal parts for 3"),
        ({"expert_ranks": 2}, "expert_ranks is 2, which does not divide 1 ranks"),
        ({"recompute": True, "compile": True}, "recompute: not with a compiled loss"),
    ],
)
def test_what_does_not_fit_is_told(tiny_run, changes, problem):
    with pytest.raises(ConfigError, match=problem):
        train(replace(tiny_run, **changes))


def test_half_set_ranks_are_told(tiny_run, monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(ConfigError, match="RANK must be a whole number"):
        train(tiny_run)
