"""`perilune model`: what the three actions print, and that two of them need no torch."""

import argparse
import json
import os
import re
import shutil
import subprocess
import sys

import pytest
import torch

from perilune.cli import model as command
from perilune.core.errors import CheckpointError, ConfigError
from perilune.model.init import random_weights
from perilune.model.model import Transformer
from perilune.model.parse_config import parse_config
from perilune.model.presets import tiny_k3
from perilune.model.save import save_checkpoint
from perilune.model.verify import INDEX, SINGLE, verify_checkpoint


@pytest.fixture(scope="module")
def directory(tmp_path_factory):
    raw = tiny_k3(mxfp4=True)
    model = random_weights(Transformer(parse_config(raw)), torch.Generator().manual_seed(1))
    path = tmp_path_factory.mktemp("cli") / "model"
    save_checkpoint(model, path)
    return path


def run(*argv: object) -> int:
    parser = argparse.ArgumentParser()
    command.add_arguments(parser)
    return command.run(parser.parse_args([str(arg) for arg in argv]))


@pytest.mark.parametrize("name", ["config.json", INDEX, SINGLE])
def test_a_pipe_in_place_of_a_file_is_one_error_and_not_waited_for(directory, tmp_path, name):
    if name != "config.json":
        shutil.copy(directory / "config.json", tmp_path)
    os.mkfifo(tmp_path / name)
    command = [sys.executable, "-m", "perilune.cli.main", "model", "verify", str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert done.returncode == 1
    assert re.fullmatch(rf"perilune: error: .*/{name}.*not a regular file\n", done.stderr)


def test_info_prints_the_published_numbers_of_k3(capsys):
    assert run("info", "kimi-k3", "--context", 1048576, "--json") == 0
    facts = json.loads(capsys.readouterr().out)
    assert round(facts["parameters"]["total"] / 1e12, 4) == 2.7795
    assert round(facts["parameters"]["activated"] / 1e9, 2) == 104.19
    assert facts["layers"]["map"][0] == "KDA+dense"
    assert facts["layers"]["map"][91:] == ["MLA+MoE", "MLA+MoE"]
    cache = facts["cache"]
    assert cache["kda_state"] == 414 * 2**20
    assert cache["latent_per_token"] == 27_648
    assert cache["total"] < cache["all_mla"] < cache["gqa"]
    assert cache["crossover"] == 5654
    assert facts["stored"]["bytes"] == 1_560_860_324_864


def test_info_for_people(capsys):
    assert run("info", "kimi-k3", "--context", 1024) == 0
    text = capsys.readouterr().out
    for piece in (
        "2.7795 T (2.7799 T with vision)",
        "104.19 B a token",
        "23 x (KDA KDA KDA MLA), 1 x (MLA); 92 MoE",
        "414.00 MiB",
        "27,648 B a token",
        "hybrid is 335.4% larger",
        "hybrid is 22.5% larger",
        "from 5,654 tokens on",
        "topk_method",
    ):
        assert piece in text


def test_info_of_a_directory_uses_its_own_context(directory, capsys):
    assert run("info", directory, "--json") == 0
    assert json.loads(capsys.readouterr().out)["cache"]["context"] == 4096


def test_info_of_nothing_lists_what_there_is():
    with pytest.raises(ConfigError, match="'kimi-k4' is neither a directory nor one of kimi-k3"):
        run("info", "kimi-k4")


@pytest.mark.parametrize("context", ["0", "-5", "many", "1.5"])
def test_a_bad_context_is_a_usage_error(context, capsys):
    with pytest.raises(SystemExit):
        run("info", "nano", "--context", context)
    assert "--context" in capsys.readouterr().err


def test_verify_counts_and_refuses(directory, tmp_path, capsys):
    assert run("verify", directory) == 0
    report = verify_checkpoint(directory)
    assert f"good: {report.num_tensors:,} tensors" in capsys.readouterr().out
    assert run("verify", directory, "--json") == 0
    assert json.loads(capsys.readouterr().out)["bytes"] == report.num_bytes
    for path in directory.iterdir():
        (tmp_path / path.name).write_bytes(path.read_bytes())
    with (tmp_path / SINGLE).open("ab") as file:
        file.write(b"x")
    with pytest.raises(CheckpointError, match="1 bytes follow the last tensor"):
        run("verify", tmp_path)


def test_convert_writes_a_checkpoint_that_verifies(directory, tmp_path, capsys):
    assert run("convert", directory, tmp_path / "b", "--experts", "plain") == 0
    assert "good:" in capsys.readouterr().out
    assert not verify_checkpoint(tmp_path / "b").config.experts_mxfp4


def test_info_and_verify_run_without_torch(directory):
    code = (
        "import sys, argparse; sys.modules['torch'] = None; sys.modules['safetensors'] = None\n"
        "from perilune.cli import model; p = argparse.ArgumentParser(); model.add_arguments(p)\n"
        f"for a in (['info', 'nano'], ['verify', {str(directory)!r}]):\n"
        "    assert model.run(p.parse_args(a)) == 0\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "good:" in done.stdout
