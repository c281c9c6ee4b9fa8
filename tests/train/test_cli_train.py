"""`perilune train`: settings, missing data, and a run from the command line."""

import json
from dataclasses import replace

import pytest

from perilune.cli import train as command
from perilune.cli.main import main
from perilune.core.errors import ConfigError
from perilune.train import prepare
from perilune.train.override import override
from perilune.train.recipes import RECIPES, recipe


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
    assert main(["train", "nano-toy", "--data", str(tmp_path)]) == 1
    assert "perilune train nano-toy --prepare --chat DIR" in capsys.readouterr().err


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
