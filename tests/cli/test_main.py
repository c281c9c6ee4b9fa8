"""The entry point: help, usage errors, failures, exit codes."""

from __future__ import annotations

import subprocess
import sys
from types import SimpleNamespace

import pytest

from perilune import __version__
from perilune.cli import main as entry
from perilune.cli.main import COMMANDS, main
from perilune.core.errors import CheckpointError


@pytest.fixture
def command(monkeypatch):
    """Installs a command `x` that does what the test says."""

    def install(run) -> None:
        module = SimpleNamespace(add_arguments=lambda parser: None, run=run)
        monkeypatch.setitem(COMMANDS, "x", entry.Command("perilune.x", "does x"))
        monkeypatch.setattr(entry.importlib, "import_module", {"perilune.x": module}.__getitem__)

    return install


def raising(error: BaseException):
    def run(args) -> int:
        raise error

    return run


def test_help_names_every_command(capsys):
    with pytest.raises(SystemExit) as exit_info:
        main(["--help"])
    assert exit_info.value.code == 0
    out = capsys.readouterr().out
    assert all(name in out and text.split()[0] in out for name, (_, text) in COMMANDS.items())


def test_without_a_command_the_help_is_an_error(capsys):
    assert main([]) == 2
    assert "COMMAND" in capsys.readouterr().err


def test_the_version(capsys):
    with pytest.raises(SystemExit):
        main(["--version"])
    assert capsys.readouterr().out == f"perilune {__version__}\n"


@pytest.mark.parametrize(
    ("argv", "says"),
    [
        (["nonsense"], "'nonsense'"),
        (["serve", "--port", "x"], "--port"),
        (["serve", "--max-running", "0"], "0 is less than 1"),
        (["serve", "--tensor-parallel", "0"], "0 is less than 1"),
        (["serve", "--host-cache", "-1"], "-1 is no number of gigabytes"),
        (["serve", "--host-cache", "nan"], "nan is no number of gigabytes"),
        (["serve", "--state-align", "-1"], "-1 is less than 0"),
        (["generate"], "PROMPT"),
        (["generate", "x", "--temperature", "9"], "9 is outside 0..2"),
        (["generate", "x", "--top-p", "0"], "0 is outside 0..1"),
        (["chat", "--unknown"], "--unknown"),
    ],
)
def test_wrong_usage_is_one_line_and_exit_2(capsys, argv, says):
    with pytest.raises(SystemExit) as exit_info:
        main(argv)
    assert exit_info.value.code == 2
    err = capsys.readouterr().err
    assert err.startswith("perilune: error: ")
    assert says in err
    assert err.count("\n") == 1


@pytest.mark.parametrize(
    ("argv", "says"),
    [
        (["serve", "/no/such/dir", "--port", "0"], "/no/such/dir is not a directory"),
        (["generate", "x", "--model", "/no/such/dir"], "/no/such/dir is not a directory"),
        (["chat", "--model", "/no/such/dir"], "/no/such/dir is not a directory"),
        (["serve", "--port", "99999"], "port 99999"),
        (["serve", "--host", "no..host"], "'no..host'"),
    ],
)
def test_a_failure_is_one_line_and_exit_1(capsys, argv, says):
    assert main(argv) == 1
    err = capsys.readouterr().err
    assert err.startswith("perilune: error: ")
    assert says in err
    assert err.count("\n") == 1


@pytest.mark.parametrize(
    ("error", "code", "err"),
    [
        (CheckpointError("bad shard"), 1, "perilune: error: bad shard\n"),
        (FileNotFoundError(2, "No such file", "/x"), 1, "perilune: error: /x: No such file\n"),
        (OSError("odd"), 1, "perilune: error: odd\n"),
        (KeyboardInterrupt(), 130, ""),
    ],
)
def test_errors_become_exit_codes(capsys, command, error, code, err):
    command(raising(error))
    assert main(["x"]) == code
    assert capsys.readouterr().err == err


@pytest.mark.parametrize(
    ("files", "says"),
    [
        (("pyproject.toml", "constraints.txt"), "-c constraints.txt -e '.[train]'"),
        ((), "x needs matplotlib: pip install 'perilune[train]'"),
    ],
    ids=["checkout", "package"],
)
def test_a_missing_extra_names_the_command_that_brings_it(
    tmp_path, monkeypatch, capsys, command, files, says
):
    for name in files:
        (tmp_path / name).touch()
    monkeypatch.setattr(entry.perilune, "__file__", str(tmp_path / "src/perilune/__init__.py"))
    command(raising(ModuleNotFoundError("no matplotlib", name="matplotlib")))
    assert main(["x"]) == 1
    err = capsys.readouterr().err
    assert err.endswith(f"{says}\n")
    assert (".venv/bin/pip install" in err) == bool(files)


@pytest.mark.parametrize(
    ("argv", "prog"),
    [
        (["chat", "--unknown"], "perilune chat"),
        (["train", "nano-toy", "--steps", "3", "extra"], "perilune train"),
        (["kernels", "check", "--unknown"], "perilune kernels check"),
        (["--unknown", "chat"], "perilune"),
    ],
)
def test_an_unknown_argument_names_the_help_that_lists_the_known_ones(capsys, argv, prog):
    with pytest.raises(SystemExit) as exit_info:
        main(argv)
    assert exit_info.value.code == 2
    problem, _, advice = capsys.readouterr().err.partition(" (see ")
    unknown = next(arg for arg in argv if arg in ("--unknown", "extra"))
    assert problem == f"perilune: error: unrecognized arguments: {unknown}"
    assert advice == f"{prog} --help)\n"


def test_a_bug_is_not_hidden(command):
    command(raising(ValueError("bug")))
    with pytest.raises(ValueError, match="bug"):
        main(["x"])


def test_a_module_that_no_extra_brings_is_a_bug(command):
    command(raising(ModuleNotFoundError("typo", name="perilune.typo")))
    with pytest.raises(ModuleNotFoundError):
        main(["x"])


def test_a_reader_that_leaves_ends_quietly():
    script = "import sys, perilune.cli.main as m; sys.exit(m.main(sys.argv[1:]))"
    done = subprocess.run(
        f"{sys.executable} -c '{script}' --help | true",
        shell=True,
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.stderr == ""


@pytest.mark.parametrize("command_name", ["serve", "generate", "chat"])
def test_help_of_a_command_does_not_import_torch(command_name):
    script = (
        "import sys\n"
        "from perilune.cli.main import main\n"
        "try:\n"
        "    main([sys.argv[1], '--help'])\n"
        "except SystemExit:\n"
        "    assert 'torch' not in sys.modules, 'torch'\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", script, command_name], capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 0, done.stderr
    assert f"perilune {command_name}" in done.stdout
