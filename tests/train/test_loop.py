"""A whole run: it learns, resumes bit by bit, and its export is the model that was trained."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch

import perilune
from perilune.core.errors import CheckpointError, ConfigError, UnsupportedError
from perilune.kernels.common.packing import Packing
from perilune.model.model import Transformer
from perilune.model.mxfp4 import fake_quantize
from perilune.model.parse_config import parse_config
from perilune.train import checkpoint, loop
from perilune.train.compile import compile_parts
from perilune.train.loop import train
from perilune.train.run_log import read_metrics
from perilune.train.step import DeviceBatch, batch_loss, moe_layers


def trained(config):
    """The fp32 weights at the end of a run."""
    model = Transformer(parse_config(config.model))
    checkpoint.load_state(Path(config.out_dir), model, [])
    return model


def metrics(config):
    return read_metrics(Path(config.out_dir) / "metrics.jsonl")


def test_loss_falls_and_the_export_is_the_trained_model(tiny_run):
    config = replace(tiny_run, steps=30, eval_every=30, save_every=30, qat_from=0.5)
    directory = train(config)

    losses = [line["loss"] for line in metrics(config) if "loss" in line]
    assert len(losses) == 30
    assert sum(losses[-3:]) / 3 < 0.7 * losses[0]
    assert metrics(config)[-1]["bpb/prose"] < 7  # 7 bits tell 128 ids apart without any model

    model = trained(config)
    for layer in moe_layers(model):
        layer.quantize = fake_quantize
    ids = torch.arange(1, 41)[None]
    with torch.no_grad():
        expected = model(ids.flatten(), Packing.of([40])).view(1, 40, -1)
        for layer in moe_layers(model):
            layer.quantize = None
        unquantised = model(ids.flatten(), Packing.of([40])).view(1, 40, -1)
    loaded = perilune.load_model(str(directory)).logits(ids)
    torch.testing.assert_close(loaded, expected, rtol=1e-4, atol=1e-4)
    assert (loaded - unquantised).abs().max() > 1e-2


def test_resume_ends_with_the_same_bits(tiny_run, monkeypatch):
    whole = replace(tiny_run, out_dir=tiny_run.out_dir + "-whole")
    train(whole)

    class Killed(Exception):
        pass

    def killed_in_step_5(self, step, batch, call=loop.Stepper.__call__):
        if step == 5:
            raise Killed
        return call(self, step, batch)

    with monkeypatch.context() as patch:
        patch.setattr(loop.Stepper, "__call__", killed_in_step_5)
        with pytest.raises(Killed):
            train(tiny_run)
    assert metrics(tiny_run)[-1]["step"] == 5  # behind the save at step 4: that line is redone
    train(tiny_run, resume=True)

    expected = (Path(whole.out_dir) / checkpoint.FILE).read_bytes()
    assert (Path(tiny_run.out_dir) / checkpoint.FILE).read_bytes() == expected
    lines = [[m | {"tokens_per_s": 0} for m in metrics(run)] for run in (whole, tiny_run)]
    assert lines[0] == lines[1]


def test_a_finished_run_resumes_to_the_same_export(tiny_run):
    directory = train(replace(tiny_run, steps=2))
    weights = (directory / "model.safetensors").read_bytes()
    assert train(replace(tiny_run, steps=2), resume=True) == directory
    assert (directory / "model.safetensors").read_bytes() == weights


def test_a_run_is_not_overwritten(tiny_run):
    train(replace(tiny_run, steps=1))
    with pytest.raises(ConfigError, match="holds a run already"):
        train(tiny_run)


def test_nothing_to_resume(tiny_run):
    with pytest.raises(CheckpointError, match="nothing to resume from"):
        train(tiny_run, resume=True)
    assert not Path(tiny_run.out_dir).exists()


def test_missing_shard_is_named(tiny_run):
    with pytest.raises(ConfigError, match="train_code"):
        train(replace(tiny_run, mixture={"code": 1.0}))


def test_no_gpu(tiny_run, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(UnsupportedError, match="no GPU"):
        train(tiny_run.on("cuda"))


def test_quantisation_starts_where_the_recipe_says(tiny_run, monkeypatch):
    seen = []

    def watched(self, step, batch, call=loop.Stepper.__call__):
        seen.append(float(moe_layers(self.model)[0].quantize.on))
        return call(self, step, batch)

    monkeypatch.setattr(loop.Stepper, "__call__", watched)
    train(replace(tiny_run, steps=5, qat_from=0.6, eval_every=0))
    assert seen == [0, 0, 0, 1, 1]


# The compiler warns of what it meets in any code (caches, `.grad` of inner tensors).
@pytest.mark.filterwarnings("ignore")
def test_compiled_parts_give_the_same_loss(tiny_run):
    batch = DeviceBatch.of(next(loop.open_loader(tiny_run)), "cpu")
    model = loop.build_model(tiny_run)
    expected = batch_loss(model, batch)
    compiled = compile_parts(model, backend="eager")
    torch.testing.assert_close(compiled(model, batch), expected)
    torch.compiler.reset()
