"""A whole run: it learns, resumes bit by bit, and its export is the model that was trained."""

import pickle
import shutil
import signal
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

import perilune
from perilune.core.errors import CheckpointError, ConfigError, UnsupportedError
from perilune.kernels.common.packing import Packing
from perilune.model.init import random_weights
from perilune.model.model import Transformer
from perilune.model.mxfp4 import fake_quantize
from perilune.model.parse_config import parse_config
from perilune.model.presets import tiny_k3
from perilune.train import checkpoint, loop
from perilune.train.compile import compile_loss
from perilune.train.loop import train
from perilune.train.override import override
from perilune.train.run_facts import read_facts
from perilune.train.run_log import CLOCKED, read_metrics
from perilune.train.step import DeviceBatch, batch_loss, moe_layers


def trained(config):
    """The fp32 weights at the end of a run."""
    model = Transformer(parse_config(config.model))
    checkpoint.load_state(Path(config.out_dir), model, [])
    return model


def metrics(config):
    return read_metrics(Path(config.out_dir) / "metrics.jsonl")


def assert_same_run(one, two):
    """The same weights, optimisers, cursor and log, bit by bit; the time may differ."""
    folders = Path(one.out_dir), Path(two.out_dir)
    states = [load_file(checkpoint.latest(folder) / "rank-0.safetensors") for folder in folders]
    assert states[0].keys() == states[1].keys()
    assert all(torch.equal(value, states[1][name]) for name, value in states[0].items())
    cursors = [checkpoint.read_progress(folder).loader for folder in folders]
    assert cursors[0] == cursors[1]
    lines = [[m | dict.fromkeys(CLOCKED) for m in metrics(run)] for run in (one, two)]
    assert lines[0] == lines[1]


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

    assert_same_run(whole, tiny_run)


def test_a_finished_run_resumes_to_the_same_export(tiny_run):
    directory = train(replace(tiny_run, steps=2))
    assert directory is not None
    weights = (directory / "model.safetensors").read_bytes()
    assert train(replace(tiny_run, steps=2), resume=True) == directory
    assert (directory / "model.safetensors").read_bytes() == weights


def test_a_killed_process_is_resumed_to_the_same_bits(tiny_run):
    whole = replace(tiny_run, out_dir=tiny_run.out_dir + "-whole", steps=16, save_every=7)
    train(whole)
    config = replace(whole, out_dir=tiny_run.out_dir)
    log = Path(config.out_dir) / "metrics.jsonl"
    code = (
        "import pickle, sys, torch; from perilune.train.loop import train; "
        f"torch.set_num_threads({torch.get_num_threads()}); train(pickle.load(sys.stdin.buffer))"
    )
    command = [sys.executable, "-c", code]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stderr=subprocess.DEVNULL) as process:
        process.stdin.write(pickle.dumps(config))
        process.stdin.close()
        while not log.exists() or not any(m["step"] == 9 for m in read_metrics(log)):
            assert process.poll() is None
        process.kill()
        assert process.wait() == -signal.SIGKILL
    assert 7 < metrics(config)[-1]["step"] < 16
    with log.open("a") as file:
        file.write('{"step": 12, "lo')  # what a kill in the middle of a write leaves
    train(config, resume=True)
    assert_same_run(whole, config)


def test_a_run_in_pieces_ends_with_the_same_bits(tiny_run):
    whole = replace(tiny_run, out_dir=tiny_run.out_dir + "-whole")
    train(whole)
    assert train(tiny_run, stop_after_s=0) is None
    assert metrics(tiny_run)[-1]["step"] == 1
    for _ in range(tiny_run.steps - 2):
        assert train(tiny_run, resume=True, stop_after_s=0) is None
    assert train(tiny_run, resume=True, stop_after_s=0) is not None
    assert_same_run(whole, tiny_run)


def test_another_recipe_is_not_resumed(tiny_run):
    train(tiny_run, stop_after_s=0)
    other = replace(tiny_run, steps=7, optim=replace(tiny_run.optim, peak_lr=0.5))
    other = override(other, "model.text_config.hidden_size=32")
    with pytest.raises(ConfigError) as caught:
        train(other, resume=True)
    assert str(caught.value) == (
        f"{tiny_run.out_dir} is a run of another recipe: model.text_config.hidden_size was 64, "
        "is 32; optim.peak_lr was 0.01, is 0.5; steps was 6, is 7"
    )


def test_other_data_are_not_resumed_with(tiny_run, tmp_path):
    train(tiny_run, stop_after_s=0)
    other = tmp_path / "other"
    shutil.copytree(tiny_run.data_dir, other)
    assert train(replace(tiny_run, data_dir=str(other)), resume=True, stop_after_s=0) is None
    manifest = other / "manifest.json"
    manifest.write_text(manifest.read_text().replace('"text_bytes": ', '"text_bytes": 1'))
    with pytest.raises(ConfigError, match="was trained on so far"):
        train(replace(tiny_run, data_dir=str(other)), resume=True)


def test_a_documents_states_start_afresh_in_a_row(tiny_run):
    """KDA's states, its convolutions and attention see nothing of what lies in front."""
    model = random_weights(loop.build_model(tiny_run), torch.Generator().manual_seed(1)).eval()
    batch = DeviceBatch.of(next(loop.open_loader(tiny_run)), "cpu")
    row = int(batch.segments_BL.amax(1).argmax())
    ids_L, segments_L = batch.inputs_BL[row], batch.segments_BL[row]
    assert segments_L.max() >= 1
    with torch.no_grad():
        packed = model.model(batch.inputs_BL.flatten(), Packing.rows(batch.segments_BL))
        together_LD = packed.view(*batch.inputs_BL.shape, -1)[row]
        for segment in range(int(segments_L.max()) + 1):
            own_L = segments_L == segment
            alone = model.model(ids_L[own_L], Packing.of([int(own_L.sum())]))
            torch.testing.assert_close(together_LD[own_L], alone, rtol=1e-3, atol=1e-4)


def test_a_run_may_move_between_its_pieces(tiny_run, tmp_path):
    train(tiny_run, stop_after_s=0)
    moved = replace(tiny_run, out_dir=str(tmp_path / "moved"))
    Path(tiny_run.out_dir).rename(moved.out_dir)
    assert train(moved, resume=True) == tmp_path / "moved" / "model"


def test_the_validation_of_a_saved_step_is_in_the_log(tiny_run, monkeypatch):
    """Whoever resumes from a state must find its line: the state comes last."""
    config = replace(tiny_run, save_every=3)
    seen = []

    def killed(*_):
        seen.extend(metrics(config))
        raise KeyboardInterrupt

    monkeypatch.setattr(checkpoint, "save_state", killed)
    with pytest.raises(KeyboardInterrupt):
        train(config)
    assert seen[-1].keys() == {"step", "bpb/prose"}


def test_the_run_tells_what_it_was(tiny_run):
    config = replace(tiny_run, steps=3, eval_every=0)
    assert train(config, stop_after_s=0) is None
    first = read_facts(Path(config.out_dir))
    train(config, resume=True)
    facts = read_facts(Path(config.out_dir))
    assert (first.steps, facts.steps) == (1, 3)
    assert facts.tokens == 3 * 4 * 64
    assert facts.seconds > first.seconds > 0
    assert facts.torch == torch.__version__
    assert facts.device.endswith("CPU")
    assert facts.recipe == config.as_json()
    assert all(share > 0 for share in facts.epochs.values())


def test_training_changes_nothing_global(tiny_run):
    before = torch.get_float32_matmul_precision(), torch.get_default_dtype()
    train(replace(tiny_run, steps=1))
    assert (torch.get_float32_matmul_precision(), torch.get_default_dtype()) == before
    assert before[0] == "highest"


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
def test_the_compiled_loss_is_the_same(tiny_run):
    small = replace(tiny_run, model=tiny_k3(mxfp4=True, num_hidden_layers=2))
    batch = DeviceBatch.of(next(loop.open_loader(small)), "cpu")
    model = loop.build_model(small)
    expected = batch_loss(model, batch)
    compiled = compile_loss(model, backend="eager")
    assert model.training
    torch.testing.assert_close(compiled(model, batch), expected)
    torch.compiler.reset()
