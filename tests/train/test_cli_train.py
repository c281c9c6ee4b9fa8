"""`perilune train`: settings, missing data, and a run from the command line."""

import json
import shlex
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
import torch

from perilune.cli import train as command
from perilune.cli.main import main
from perilune.core.errors import ConfigError
from perilune.train import prepare
from perilune.train.override import override
from perilune.train.recipes import RECIPES, recipe
from perilune.train.run_log import read_metrics


def test_a_run_from_the_command_line(tiny_run, tiny_data, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(command, "recipe", lambda name: replace(tiny_run, steps=99))
    out = tmp_path / "cli-run"
    argv = ["train", "nano", "--out", str(out), "--steps", "2", "--device", "cpu"]
    assert main([*argv, "--set", "optim.peak_lr=0.5"]) == 0
    assert str(out / "model") in capsys.readouterr().out
    lines = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines] == [1, 2, 2]
    assert lines[0]["lr"] == 0.5
    assert (out / "model" / "model.safetensors").is_file()
    assert (out / "curve.png").read_bytes().startswith(b"\x89PNG")
    assert main(argv) == 1
    assert "holds a run already" in capsys.readouterr().err


def test_an_unknown_recipe_lists_what_there_is(capsys):
    assert main(["train", "nanu"]) == 1
    message = "perilune: error: unknown recipe 'nanu'; known: nano, nano-toy\n"
    assert capsys.readouterr().err == message


def test_missing_data_names_the_command_that_makes_it(tmp_path, capsys):
    assert main(["train", "nano", "--data", str(tmp_path)]) == 1
    assert "perilune train nano --prepare --chat DIR" in capsys.readouterr().err


@pytest.fixture
def clone(tmp_path, monkeypatch):
    """A folder with the bundled model and no data, as the current one; little text is made."""
    (tmp_path / "models").mkdir()
    (tmp_path / "models" / "nano").symlink_to(Path(__file__).parents[2] / "models" / "nano")
    little = partial(prepare.prepare_synthetic, synthetic_bytes=300_000)
    monkeypatch.setattr(prepare, "prepare_synthetic", little)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_the_toy_needs_nothing_but_the_repository(clone, capsys):
    settings = ["--set", "row_len=128", "--set", "optim.warmup_steps=2"]
    assert main(["train", "nano-toy", "--steps", "8", *settings]) == 0
    out, err = capsys.readouterr()
    assert "data/nano-toy: " in out
    assert "generate:   0%" in err
    assert "encode: 100%" in err
    lines = read_metrics(clone / "runs" / "nano-toy" / "metrics.jsonl")
    losses = [line["loss"] for line in lines if "loss" in line]
    assert losses[-1] < losses[0] - 1
    assert 0 < lines[-1]["bpb/synthetic"] < 8
    model = str(clone / "runs" / "nano-toy" / "model")
    assert main(["generate", "Hello", "--model", model, "--max-tokens", "3", "--threads", "1"]) == 0


def test_the_recipes_threads_are_used_and_may_change(tiny_run, monkeypatch):
    used = []
    monkeypatch.setattr(torch, "set_num_threads", used.append)
    monkeypatch.setattr(command, "recipe", lambda name: tiny_run)
    argv = ["train", "nano", "--set", "eval_every=0", "--steps", "2"]
    assert main([*argv, "--set", "threads=1", "--stop-after-minutes", "0"]) == 0
    assert used == [1]
    assert main([*argv, "--resume"]) == 0
    assert used == [1]


def test_the_toys_data_can_be_prepared_before(clone, capsys):
    assert main(["train", "nano-toy", "--prepare"]) == 0
    manifest = (clone / "data" / "nano-toy" / "manifest.json").read_text()
    assert json.loads(manifest)["shards"]["train_synthetic"]["num_tokens"] > 100_000
    assert [source["name"] for source in json.loads(manifest)["sources"]] == ["synthetic"]


def test_the_toy_names_the_tokenizer_that_it_misses(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert main(["train", "nano-toy"]) == 1
    assert "models/nano holds no tiktoken.model" in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []


def test_the_toy_ends_its_text_as_its_tokenizer_does():
    model, bundled = recipe("nano-toy").model, recipe("nano").model
    keys = [key for key in bundled if key.endswith("_token_id")]
    assert len(keys) == 3
    assert [model[key] for key in keys] == [bundled[key] for key in keys]


def test_a_stopped_run_tells_the_command_that_goes_on(tiny_run, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(command, "recipe", lambda name: tiny_run)
    out = tmp_path / "a run"
    argv = ["train", "nano", "--out", str(out), "--steps", "2", "--set", "optim.peak_lr=0.5"]
    assert main([*argv, "--stop-after-minutes", "0"]) == 0
    said = capsys.readouterr().out
    assert said.startswith(f"{out}: saved before the last step; go on with: perilune train nano ")
    assert main(shlex.split(said.partition("with: perilune ")[2])) == 0
    assert (out / "model").is_dir()


def test_prepare(tmp_path, monkeypatch, capsys):
    called = {}

    def fake(out_dir, cache_dir, **options):
        called.update(out_dir=out_dir, cache_dir=cache_dir, **options)
        manifest = {"shards": {"a": {"num_tokens": 1000}, "b": {"num_tokens": 234}}}
        return prepare.Prepared(out_dir / "manifest.json", manifest)

    monkeypatch.setattr(prepare, "prepare", fake)
    data = tmp_path / "data" / "nano"
    argv = ["train", "nano", "--prepare", "--data", str(data)]
    assert main(argv) == 1
    assert "--chat DIR" in capsys.readouterr().err
    assert main([*argv, "--chat", str(tmp_path)]) == 0
    assert "1,234 tokens" in capsys.readouterr().out
    assert called["out_dir"] == data
    assert called["chat_dir"] == tmp_path


@pytest.mark.parametrize("name", RECIPES)
def test_recipes_are_whole(name):
    config = recipe(name)
    assert config.name == name
    assert sum(config.mixture.values()) == pytest.approx(1)


def test_override_reaches_into_every_level():
    config = recipe("nano")
    config = override(config, "steps=7")
    config = override(config, "optim.peak_lr=1")
    config = override(config, "optim.adam_betas=[0.8, 0.9]")
    config = override(config, "mixture.chat=0.5")
    config = override(config, "model.text_config.num_experts=16")
    config = override(config, "out_dir=12")
    config = override(config, "compile=false")
    assert (config.steps, config.optim.peak_lr, config.out_dir) == (7, 1.0, "12")
    assert config.optim.adam_betas == (0.8, 0.9)
    assert config.mixture == {**recipe("nano").mixture, "chat": 0.5}
    assert config.model["text_config"]["num_experts"] == 16
    assert config.compile is False
    assert recipe("nano").steps != 7


@pytest.mark.parametrize(
    ("setting", "problem"),
    [
        ("steps", "expected KEY=VALUE"),
        ("stops=3", "unknown key 'stops'"),
        ("optim.lr=3", "unknown key 'lr'"),
        ("steps.more=3", "unknown key 'more' \\(there is: nothing inside\\)"),
        ("steps=many", "expected a value like"),
        ("steps=1.5", "expected a value like"),
        ("compile=1", "expected a value like"),
    ],
)
def test_bad_settings(setting, problem):
    with pytest.raises(ConfigError, match=f"--set {setting}: {problem}"):
        override(recipe("nano"), setting)
