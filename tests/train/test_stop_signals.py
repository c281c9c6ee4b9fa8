"""Ctrl-C and SIGTERM end a run after a step, with a state that goes on to the same bits."""

import os
import pickle
import shlex
import signal
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from perilune.cli import train as command
from perilune.cli.main import main
from perilune.train import checkpoint
from perilune.train.loop import train
from perilune.train.run_log import CLOCKED, read_metrics
from perilune.train.step import Stepper
from perilune.train.stop_signals import StopSignals

COMMAND = f"""
import pickle, signal, sys, torch
from perilune.cli import train
from perilune.cli.main import main

config = pickle.load(sys.stdin.buffer)
signal.signal(signal.SIGINT, signal.default_int_handler)  # a background job may ignore it
torch.set_num_threads({torch.get_num_threads()})
train.recipe = lambda name: config
sys.exit(main(sys.argv[1:]))
"""


def run_until(config, argv, step, number):
    """Signals a run of `perilune` when its log reaches `step`; its last line and exit code."""
    log = Path(config.out_dir) / "metrics.jsonl"
    process = subprocess.Popen(
        [sys.executable, "-c", COMMAND, *argv],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )
    with process:
        process.stdin.write(pickle.dumps(config))
        process.stdin.close()
        while not log.exists() or not any(m["step"] == step for m in read_metrics(log)):
            assert process.poll() is None, process.stderr.read().decode()
        process.send_signal(number)
        said, err = process.stdout.read().decode(), process.stderr.read().decode()
    assert "Traceback" not in err
    assert said.count("\n") == 1
    return said, process.returncode


def test_a_signalled_run_goes_on_to_the_same_bits(tiny_run, monkeypatch, capsys):
    whole = replace(tiny_run, steps=12, eval_every=6, save_every=100)
    whole = replace(whole, out_dir=tiny_run.out_dir + "-whole")
    train(whole)
    config = replace(whole, out_dir=tiny_run.out_dir)
    out = Path(config.out_dir)
    advice = f"{out}: saved before the last step; go on with: perilune train tiny --resume\n"

    said, returncode = run_until(config, ["train", "tiny"], step=2, number=signal.SIGINT)
    assert returncode == 130
    assert said == advice
    stopped = checkpoint.read_progress(out).step
    assert 2 <= stopped < 11
    assert read_metrics(out / "metrics.jsonl")[-1]["step"] == stopped
    assert not (out / "model").exists()

    def terminated(self, step, batch, call=Stepper.__call__):
        os.kill(os.getpid(), signal.SIGTERM)
        return call(self, step, batch)

    argv = shlex.split(said.partition("with: perilune ")[2])
    monkeypatch.setattr(command, "recipe", lambda name: config)
    with monkeypatch.context() as patch:
        patch.setattr(Stepper, "__call__", terminated)
        assert main(argv) == 143
    assert capsys.readouterr().out == advice
    assert checkpoint.read_progress(out).step == stopped + 1
    assert main(argv) == 0

    states = [
        load_file(checkpoint.latest(Path(c.out_dir)) / "rank-0.safetensors")
        for c in (whole, config)
    ]
    assert states[0].keys() == states[1].keys()
    assert all(torch.equal(value, states[1][name]) for name, value in states[0].items())
    logs = [read_metrics(Path(c.out_dir) / "metrics.jsonl") for c in (whole, config)]
    assert [m | dict.fromkeys(CLOCKED) for m in logs[0]] == [
        m | dict.fromkeys(CLOCKED) for m in logs[1]
    ]


@pytest.fixture
def handlers():
    """Handlers of this test's own for both signals; what they received."""
    received = []
    numbers = (signal.SIGINT, signal.SIGTERM)
    before = [signal.signal(number, lambda n, _: received.append(n)) for number in numbers]
    yield received
    for number, handler in zip(numbers, before, strict=True):
        signal.signal(number, handler)


def test_the_first_signal_asks_and_the_second_one_acts(handlers):
    with StopSignals() as signals:
        assert not signals.is_stopped()
        signal.raise_signal(signal.SIGTERM)
        assert signals.is_stopped()
        assert handlers == []
        signal.raise_signal(signal.SIGINT)
    assert signals.received == signal.SIGTERM
    assert handlers == [signal.SIGINT]


def test_behind_the_block_signals_act_again(handlers):
    with StopSignals() as signals:
        pass
    signal.raise_signal(signal.SIGINT)
    assert signals.received is None
    assert handlers == [signal.SIGINT]


def test_an_ignored_signal_stays_ignored(handlers):
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    with StopSignals() as signals:
        signal.raise_signal(signal.SIGINT)
        assert signals.received is None
    assert signal.getsignal(signal.SIGINT) is signal.SIG_IGN
