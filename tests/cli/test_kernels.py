"""`perilune kernels`: what it lists, its table, and its exit status when a check is red."""

import argparse
import io
import sys
from dataclasses import replace

import pytest

from perilune.cli import kernels, kernels_list
from perilune.cli import kernels_check as command
from perilune.cli.main import main
from perilune.core.errors import UnsupportedError
from perilune.kernels import plugins
from perilune.kernels.norm.reference import rms_norm
from perilune.kernels.registry import OPS, spec
from perilune.kernels.testing import CheckResult, implementation

# Triton decides when it is imported, and torch's compiler imports it in the first run of some op.
implementation.use_interpreter()


def run(*argv: str) -> int:
    parser = argparse.ArgumentParser()
    kernels.add_arguments(parser)
    return kernels.run(parser.parse_args(argv))


def eps_forgotten(x_D, weight_D, eps):
    return rms_norm(x_D, weight_D, 0.0)


def plant(monkeypatch) -> None:
    wrong = replace(
        spec("rms_norm"),
        oracle=spec("rms_norm").reference,
        reference=f"{__name__}:eps_forgotten",
        backends={},
    )
    monkeypatch.setattr(command, "spec", lambda name: wrong)


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def listed(capsys) -> dict[str, list[list[str]]]:
    """By op: the words of each row below its signature."""
    entries = capsys.readouterr().out.rstrip("\n").split("\n\n")[: len(OPS)]
    heads = [entry.split("\n")[0] for entry in entries]
    assert heads == [name + spec(name).signature for name in OPS]
    return {
        name: [row.split() for row in entry.split("\n")[1:]]
        for name, entry in zip(OPS, entries, strict=True)
    }


def test_list_says_what_serves_each_op_on_each_device_and_why(capsys):
    assert run("list") == 0
    for name, rows in listed(capsys).items():
        declared = spec(name)
        for device, (what, path, *why) in zip(("cpu", "cuda"), rows, strict=False):
            own = device in declared.backends
            assert (what, path) == (device, declared.backends.get(device, declared.reference))
            assert " ".join(why) == (
                "own, declared for it" if own else "reference, since no backend is declared for it"
            )


@pytest.fixture
def no_packages(monkeypatch):
    monkeypatch.setattr(plugins, "version_of", lambda distribution: None)


@pytest.mark.usefixtures("no_packages")
def test_the_plug_ins_that_come_with_perilune_are_listed_where_they_are_missing(capsys):
    assert run("list") == 0
    rows = [" ".join(words) for words in listed(capsys)["kda_chunk"][2:]]
    assert rows == [
        "fla perilune.kernels.kda.plugins:fla_chunk plug-in, fla-core is not installed",
        "flash_kda perilune.kernels.kda.plugins:flash_kda plug-in, flash_kda is not installed",
    ]


def test_strict_fails_and_names_what_has_no_kernel_on_a_gpu(monkeypatch, capsys):
    plain = ["kda_chunk", "router"]

    def without(name):
        return replace(spec(name), backends={}) if name in plain else spec(name)

    monkeypatch.setattr(kernels_list, "spec", without)
    assert run("list", "--strict") == 1
    last = capsys.readouterr().out.rstrip("\n").split("\n")[-1]
    assert last == "2 op(s) would run the plain-torch reference on cuda: kda_chunk, router"


def test_strict_succeeds_since_every_op_has_its_kernel(capsys):
    assert run("list", "--strict") == 0
    assert "would" not in capsys.readouterr().out


@pytest.mark.usefixtures("no_packages")
def test_strict_names_what_a_choice_keeps_from_running(monkeypatch, capsys):
    monkeypatch.setenv("PERILUNE_KERNELS", "kda_chunk=flash_kda")
    assert run("list", "--strict") == 1
    out = capsys.readouterr().out
    assert "cuda       refused: backend flash_kda of kda_chunk needs flash_kda, which is not" in out
    assert out.endswith("1 op(s) would not run on cuda at all: kda_chunk\n")


def test_check_counts_by_family_and_succeeds(capsys):
    reference = ("--backend", "reference", "--tier", "cpu")
    assert run("check", "causal_conv", *reference, "--seed", "5") == 0
    out = capsys.readouterr()
    head, *rows = out.out.rstrip("\n").split("\n")
    assert head.split() == ["op", "backend", "family", "checks", "red", "refused"]
    rows, blank, total, seed = rows[:-3], *rows[-3:]
    assert {"conformance", "poison", "causality"} <= {row.split()[2] for row in rows}
    assert all(row.startswith("causal_conv  reference") for row in rows)
    assert blank == ""
    count = sum(int(row.split()[-3]) for row in rows)
    assert total == f"{count} checks of 1 op(s), tier cpu: 0 red"
    assert seed == "seed 5 beside the fixed ones (repeat with --seed 5)"
    assert out.err == ""


def test_a_seed_repeats_a_run_and_without_one_it_is_drawn(capsys):
    outputs = []
    for seed in (["--seed", "7"], ["--seed", "7"], [], []):
        assert run("check", "rms_norm", "--tier", "cpu", "--verbose", *seed) == 0
        outputs.append(capsys.readouterr().out)
    assert outputs[0] == outputs[1]
    assert len(set(outputs)) == 3


def test_a_red_check_is_shown_and_fails(monkeypatch, capsys):
    plant(monkeypatch)
    assert run("check", "rms_norm", "--tier", "cpu", "--seed", "3") == 1
    out = capsys.readouterr().out
    red = [line for line in out.split("\n") if line.startswith("RED rms_norm, reference, ")]
    assert any("conformance, as_small_as_eps: output 0" in line for line in red)
    assert all("(perilune kernels check rms_norm --seed " in line for line in red)
    assert f"{len(red)} red" in out


def test_all_ops_are_checked_by_default(monkeypatch, capsys):
    asked = []

    def one_result(op, *, seed=None, backend, tier, drawn=None, truths=None):
        asked.append((op.name, seed, drawn, backend, tier))
        yield CheckResult(op.name, "case", "reference", "output 0", 0.0, 1.0)

    monkeypatch.setattr(command, "check", one_result)
    monkeypatch.setattr(command, "check_properties", one_result)
    monkeypatch.setattr(command, "use_interpreter", lambda: None)
    assert run("check", "--seed", "3", "--tier", "cpu") == 0
    for name in OPS:
        seeds = [(seed, drawn) for op, seed, drawn, *_ in asked if op == name]
        assert seeds == [(3, None), (None, 3)]
    assert {row[3:] for row in asked} == {(None, "cpu")}
    assert f"of {len(OPS)} op(s)" in capsys.readouterr().out


@pytest.fixture
def no_accelerator(monkeypatch):
    for module in (implementation, command):
        monkeypatch.setattr(module, "is_here", lambda device: device == "cpu")


@pytest.mark.usefixtures("no_accelerator")
def test_a_backend_without_its_device_is_said_to_be_unchecked(capsys):
    assert run("check", "linear") == 0
    lines = capsys.readouterr().out.split("\n")
    assert "not checked here: linear on cuda (no cuda device)" in lines
    assert not any(line.startswith("linear  cuda") for line in lines)


@pytest.mark.usefixtures("no_accelerator")
def test_asking_for_an_absent_device_is_an_error(capsys):
    assert main(["kernels", "check", "linear", "--backend", "cuda"]) == 1
    assert "no cuda device here" in capsys.readouterr().err


def test_one_backend_can_be_asked_for(capsys):
    assert run("check", "experts", "--backend", "reference", "--tier", "cpu") == 0
    out = capsys.readouterr().out
    rows = [line for line in out.split("\n")[1:] if line.startswith("experts")]
    assert {row.split()[1] for row in rows} == {"reference"}
    assert "not checked" not in out


def test_a_bar_shows_on_a_terminal_only(monkeypatch, capsys):
    screen = Terminal()
    monkeypatch.setattr(sys, "stderr", screen)
    assert run("check", "situ", "--tier", "cpu") == 0
    assert "situ" in screen.getvalue()
    assert "RED" not in capsys.readouterr().out


def test_an_unknown_op_is_one_line(capsys):
    with pytest.raises(UnsupportedError):
        run("check", "no_such_op")
    assert main(["kernels", "check", "no_such_op"]) == 1
    error = capsys.readouterr().err
    assert error.startswith("perilune: error: unknown op 'no_such_op'; known: ")
    assert error.count("\n") == 1


@pytest.mark.parametrize("seed", ["-1", "x", "1.5", "4294967296", "٣"])
def test_a_wrong_seed_is_a_usage_error(seed, capsys):
    with pytest.raises(SystemExit) as stop:
        main(["kernels", "check", f"--seed={seed}"])
    assert stop.value.code == 2
    assert "must be a whole number" in capsys.readouterr().err
