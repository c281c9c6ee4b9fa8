"""A package's backend serves once it is chosen and its check is green, and not a day longer."""

from __future__ import annotations

import logging
import os
import shutil
import subprocess
import sys
from pathlib import Path

import plugin_packages
import pytest
import torch

from perilune.cli.main import main
from perilune.core.errors import UnsupportedError
from perilune.kernels import plugins, registry, verdict
from perilune.kernels.bench.ran import code_of, entered
from perilune.kernels.plugins import find
from perilune.kernels.registry import Op, choose, load_attr, resolve, spec
from perilune.kernels.serving import op_folder
from perilune.kernels.situ.reference import situ_glu

X = torch.randn(3, 8, generator=torch.Generator().manual_seed(0))
RUN = "run `perilune kernels check situ --backend {}`"
TRUE = "def run(*x, **y): return true(*x, **y)"


@pytest.fixture(scope="module")
def example(tmp_path_factory) -> Path:
    return plugin_packages.pip_install(tmp_path_factory.mktemp("example"), "1.0")


@pytest.fixture(autouse=True)
def alone(monkeypatch, tmp_path):
    """No verdict, no choice, and no module of a package of an earlier test."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.delenv("PERILUNE_KERNELS", raising=False)
    monkeypatch.setattr(registry, "_choices", {})
    before = set(sys.modules)
    yield
    for name in set(sys.modules) - before:
        if name.partition(".")[0] in ("perilune_example", "mine", "yours"):
            del sys.modules[name]


@pytest.fixture
def mine(monkeypatch, tmp_path) -> Path:
    """A package with a right backend `mine` of `situ`."""
    return installed(monkeypatch, tmp_path, "mine", TRUE)


def installed(monkeypatch, tmp_path, package, body, **more) -> Path:
    folder = plugin_packages.make(tmp_path / package, package, body, **more)
    monkeypatch.syspath_prepend(str(folder))
    return folder


def green(name="mine") -> Path:
    """What a green check leaves behind."""
    counts = {"checks": 7, "refused": 0, "seed": 1}
    return verdict.write(op_folder(spec("situ")), find("situ", name), "cpu", **counts)


def ran(op: Op, path: str) -> bool:
    """Whether a call of `op` enters the function `path`, and is right."""
    code = code_of(load_attr(path))
    out = []
    seen = entered(lambda: out.append(op(X, 4.0, 25.0)), {code})
    torch.testing.assert_close(out[0], situ_glu(X, 4.0, 25.0))
    return seen == {code}


def command(target: Path, *arguments: str, **variables: str) -> subprocess.CompletedProcess[str]:
    variables = {"PYTHONPATH": str(target), "OMP_NUM_THREADS": "1", **variables}
    return subprocess.run(
        [sys.executable, "-m", "perilune.cli.main", *arguments],
        env=os.environ | variables,
        capture_output=True,
        text=True,
        timeout=120,
    )


def test_an_installed_package_serves_after_its_check_and_not_before(example, monkeypatch, caplog):
    monkeypatch.setenv("PERILUNE_KERNELS", "situ=example")
    before = command(example, "kernels", "list").stdout
    unchecked = "example (perilune-example 1.0) is not checked for situ on cpu"
    assert f"  cpu      refused: {unchecked}: {RUN.format('example')}" in before
    checked = command(example, "kernels", "check", "situ", "--backend", "example", "--seed", "4")
    assert checked.returncode == 0, checked.stdout + checked.stderr
    assert "example (perilune-example 1.0) may serve situ on cpu" in checked.stdout
    monkeypatch.syspath_prepend(str(example))
    with caplog.at_level(logging.INFO, logger=registry.__name__):
        assert ran(resolve("situ"), "perilune_example.situ:situ_glu")
    (line,) = caplog.messages
    assert line.startswith("op situ on cpu: perilune_example.situ:situ_glu (plug-in example ")
    assert "(perilune-example 1.0) chosen by PERILUNE_KERNELS, checked on 20" in line
    assert "kernels list" not in line
    assert main(["kernels", "list"]) == 0


def test_another_version_is_refused_until_it_is_checked(example, monkeypatch, tmp_path):
    monkeypatch.syspath_prepend(str(example))
    green("example")
    choose("situ", "example")
    assert ran(resolve("situ"), "perilune_example.situ:situ_glu")
    monkeypatch.syspath_prepend(str(plugin_packages.pip_install(tmp_path, "1.1")))
    with pytest.raises(UnsupportedError) as refused:
        resolve("situ")(X, 4.0, 25.0)
    assert str(refused.value) == (
        "example (perilune-example 1.1) changed since it was checked for situ"
        f" (perilune-example 1.0 then, 1.1 now): {RUN.format('example')}"
    )


def test_a_faulty_version_is_red_and_takes_an_earlier_verdict_back(
    example, monkeypatch, tmp_path, capsys
):
    """tanh by the sigmoid: right to 1e-6, except for small numbers, where it cancels."""
    copy = shutil.copytree(example, tmp_path / "faulty")
    source = copy / "perilune_example" / "situ.py"
    right = "(x / beta).tanh() * beta"
    assert right in source.read_text()
    wrong = "beta * (2 * (2 * x / beta).sigmoid() - 1)"
    source.write_text(source.read_text().replace(right, wrong))
    monkeypatch.syspath_prepend(str(copy))
    record = green("example")
    assert record.exists()
    assert main(["kernels", "check", "situ", "--backend", "example", "--seed", "4"]) == 1
    out = capsys.readouterr().out
    assert "RED situ, example, regimes, scale 0.01" in out
    assert "(perilune kernels check situ --backend example --seed " in out
    assert out.endswith("example (perilune-example 1.0) may not serve situ on cpu\n")
    assert not record.exists()
    choose("situ", "example")
    with pytest.raises(UnsupportedError, match="is not checked for situ on cpu"):
        resolve("situ")(X, 4.0, 25.0)


@pytest.mark.usefixtures("mine")
def test_a_choice_reaches_handles_that_were_used_before_and_can_be_taken_back(monkeypatch):
    op = resolve("situ")
    assert not ran(op, "mine:true")
    green()
    assert not ran(resolve("situ"), "mine:true")
    choose("situ", "mine")
    assert ran(op, "mine:true")
    monkeypatch.setenv("PERILUNE_KERNELS", "situ=no_such_thing")
    assert ran(resolve("situ"), "mine:true")
    choose("situ", None)
    assert not ran(op, "mine:true")


@pytest.mark.usefixtures("mine")
@pytest.mark.parametrize(
    "content",
    [b"", b'{"made_with": {"dev', b"\xff\xfe", b"[]", b'{"date": 3}', b'{"unknown": 1}'],
)
def test_a_damaged_record_does_not_count(content, capsys):
    record = green()
    assert record.read_bytes().endswith(b"}")
    record.write_bytes(content)
    choose("situ", "mine")
    with pytest.raises(UnsupportedError) as refused:
        resolve("situ")(X, 4.0, 25.0)
    assert "the record of the check of mine (mine 1.0) for situ is damaged" in str(refused.value)
    assert str(refused.value).endswith(RUN.format("mine"))
    assert main(["kernels", "list"]) == 0
    assert f"is damaged ({record}" in capsys.readouterr().out


@pytest.mark.usefixtures("mine")
def test_a_record_is_written_whole_or_not_at_all(monkeypatch):
    record = green()
    whole = record.read_bytes()

    def fails(self, target):
        raise OSError("no space left")

    monkeypatch.setattr(Path, "replace", fails)
    with pytest.raises(OSError, match="no space left"):
        green()
    assert record.read_bytes() == whole


CHANGES = {
    "perilune 0 then": lambda patch, folder: patch.setattr(
        verdict, "version_of", {"mine": "1.0", "perilune": "0", "triton": "0"}.get
    ),
    "torch 0 then": lambda patch, folder: patch.setattr(torch, "__version__", "0"),
    "device cpu, X then, cpu now": lambda patch, folder: patch.setattr(
        verdict, "device_name", lambda device: "cpu, X"
    ),
    "triton .*, interpreted now": lambda patch, folder: patch.delenv("TRITON_INTERPRET"),
    "the source of the op": lambda patch, folder: patch.setattr(
        verdict, "_digest", lambda files, true=verdict._digest: true(list(files)[:2])
    ),
    "the source of the plug-in": lambda patch, folder: (folder / "mine.py").write_text("x = 1"),
    "the files of the plug-in": lambda patch, folder: patch.setattr(
        verdict, "_record", lambda distribution: "other"
    ),
}


@pytest.mark.parametrize("told", CHANGES)
def test_whatever_a_verdict_was_made_with_ends_it_by_changing(told, mine, monkeypatch):
    path = verdict.path_of(find("situ", "mine"), "cpu")
    source = (mine / "mine.py").read_text()
    with monkeypatch.context() as patch:
        CHANGES[told](patch, mine)
        patch.setattr(verdict, "path_of", lambda found, device: path)
        green()
    (mine / "mine.py").write_text(source)
    choose("situ", "mine")
    with pytest.raises(UnsupportedError, match=f"changed since it was checked .*{told}"):
        resolve("situ")(X, 4.0, 25.0)
    green()
    assert ran(resolve("situ"), "mine:true")


def test_two_gpus_do_not_share_a_record(mine, monkeypatch):
    found, paths = find("situ", "mine"), set()
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    for gpu in ("NVIDIA H200", "NVIDIA H100"):
        monkeypatch.setattr(torch.cuda, "get_device_name", lambda gpu=gpu: gpu)
        paths.add(verdict.path_of(found, "cuda").name)
    assert paths == {"situ.mine.cuda-NVIDIA-H200.json", "situ.mine.cuda-NVIDIA-H100.json"}


@pytest.mark.usefixtures("mine")
def test_a_broken_package_is_shown_and_harms_nobody_else(monkeypatch, tmp_path, capsys):
    folder = installed(monkeypatch, tmp_path, "yours", TRUE, backend="yours")
    (folder / "yours.py").write_text("import no_such_module")
    green()
    choose("situ", "mine")
    assert ran(resolve("situ"), "mine:true")
    assert main(["kernels", "list"]) == 0
    reason = "ModuleNotFoundError: No module named 'no_such_module'"
    shown = f"plug-in yours (registered by yours) is broken: {reason}"
    assert shown in capsys.readouterr().out.split("\n")
    monkeypatch.setenv("PERILUNE_KERNELS", "rms_norm=yours")
    with pytest.raises(UnsupportedError, match=reason):
        resolve("rms_norm")(X, torch.ones(8), 1e-6)


WRONG = {
    "holds a str, not a Plugin": ("PLUGIN = 'x'", "yours"),
    "it is for op 'sito', which is unknown here": (
        "PLUGIN = Plugin(op='sito', run='yours:run', devices=('cpu',))",
        "yours",
    ),
    "no plug-in may be called 'cuda'": ("", "cuda"),
    "SystemExit: 3": ("raise SystemExit(3)", "yours"),
    "ZeroDivisionError: division by zero": ("1 / 0", "yours"),
}


@pytest.mark.parametrize("reason", WRONG)
def test_a_wrong_declaration_is_shown_with_its_reason(reason, monkeypatch, tmp_path, capsys):
    body, backend = WRONG[reason]
    installed(monkeypatch, tmp_path, "yours", body, backend=backend)
    assert main(["kernels", "list"]) == 0
    shown = [line for line in capsys.readouterr().out.split("\n") if "is broken" in line]
    assert len(shown) == 1
    assert shown[0].startswith(f"plug-in {backend} (registered by yours) is broken: ")
    assert reason in shown[0]


@pytest.mark.usefixtures("mine")
def test_a_check_without_an_op_is_of_those_that_the_plug_in_is_for(capsys):
    assert main(["kernels", "check", "--backend", "mine", "--seed", "4"]) == 0
    assert "checks of 1 op(s)" in (out := capsys.readouterr().out)
    assert "mine (mine 1.0) may serve situ on cpu, with PERILUNE_KERNELS=situ=mine" in out


@pytest.mark.usefixtures("mine")
def test_two_packages_of_one_name_are_both_named(monkeypatch, tmp_path, capsys):
    installed(monkeypatch, tmp_path, "yours", TRUE, backend="mine")
    sentence = "op situ has two backends 'mine', from (mine and yours|yours and mine): uninstall"
    with pytest.raises(UnsupportedError, match=sentence):
        choose("situ", "mine")
    monkeypatch.setenv("PERILUNE_KERNELS", "situ=mine")
    with pytest.raises(UnsupportedError, match=sentence):
        resolve("situ")(X, 4.0, 25.0)
    assert main(["kernels", "list"]) == 0
    assert capsys.readouterr().out.count("op situ has two backends 'mine'") == 3


@pytest.mark.usefixtures("mine")
@pytest.mark.parametrize(
    ("choices", "sentence"),
    [
        ("situ=yours", "op situ has no backend 'yours'; plug-ins for it: mine"),
        ("situ=fla", "op situ has no backend 'fla'"),
        ("sito=mine", "PERILUNE_KERNELS names an unknown op 'sito'"),
        ("situ=mine", "mine .* serves situ on cuda, not on cpu"),
    ],
)
def test_a_choice_that_cannot_serve_is_one_sentence(choices, sentence, monkeypatch, mine):
    green()
    if choices == "situ=mine":
        source = mine / "mine.py"
        source.write_text(source.read_text().replace('("cpu",)', '("cuda",)'))
        del sys.modules["mine"]
    monkeypatch.setenv("PERILUNE_KERNELS", choices)
    with pytest.raises(UnsupportedError, match=sentence):
        resolve("situ")(X, 4.0, 25.0)


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        ("situ --backend mine", "op situ has no backend 'mine'"),
        ("situ --backend fla", "op situ has no backend 'fla'"),
        ("--backend mine", "no plug-in is called 'mine'"),
        ("--backend yours", "yours (registered by yours) is broken: ZeroDivisionError"),
    ],
)
def test_a_check_of_what_is_not_there_is_one_line(
    arguments, sentence, monkeypatch, tmp_path, capsys
):
    installed(monkeypatch, tmp_path, "yours", "1 / 0", backend="yours")
    assert main(["kernels", "check", *arguments.split()]) == 1
    assert sentence in capsys.readouterr().err


def test_a_check_of_a_package_that_is_missing_is_one_line(monkeypatch, capsys):
    monkeypatch.setattr(plugins, "version_of", lambda distribution: None)
    assert main(["kernels", "check", "kda_chunk", "--backend", "flash_kda"]) == 1
    error = capsys.readouterr().err
    assert error == "perilune: error: flash_kda is not installed: flash_kda needs it\n"
