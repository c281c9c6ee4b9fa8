"""`perilune kernels check --jobs`: several processes find what one finds; one that dies is red."""

from __future__ import annotations

import os
import signal
import subprocess
import sys

import plugin_packages
import pytest

from perilune.cli.main import main
from perilune.core.errors import UnsupportedError
from perilune.kernels import verdict
from perilune.kernels.plugins import find
from perilune.kernels.registry import spec
from perilune.kernels.serving import op_folder

CHECK = ["kernels", "check", "situ", "--tier", "cpu", "--seed", "4"]


@pytest.fixture
def plugin(monkeypatch, tmp_path):
    """Installs a backend `mine` of `situ` with the given `run`, for processes started here too."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))

    def install(body: str) -> str:
        folder = str(plugin_packages.make(tmp_path / "mine", "mine", body))
        monkeypatch.syspath_prepend(folder)
        return folder

    yield install
    sys.modules.pop("mine", None)


def table(capsys, *more: str) -> tuple[int, str]:
    status = main([*CHECK, *more])
    return status, capsys.readouterr().out


def test_two_processes_print_what_one_prints(capsys):
    alone, shared = (table(capsys, "--verbose", "--jobs", jobs) for jobs in "12")
    assert alone[0] == 0
    assert shared == alone


WRONG_FOR_65 = """
def run(gate_up_2I, beta, linear_beta):
    return true(gate_up_2I, beta, linear_beta) * (1 + (len(gate_up_2I) == 65))
"""


def test_what_is_red_for_one_process_is_red_for_two(plugin, capsys):
    plugin(WRONG_FOR_65)
    alone, shared = (table(capsys, "--backend", "mine", "--jobs", jobs) for jobs in "12")
    assert alone[0] == 1
    assert shared == alone
    assert "\nRED situ, mine, lengths, 65 tokens: " in shared[1]


DIES_AT_129 = """
import os, signal

def run(gate_up_2I, beta, linear_beta):
    if len(gate_up_2I) == 129:
        {death}
    return true(gate_up_2I, beta, linear_beta)
"""


@pytest.mark.parametrize(
    ("death", "reason"),
    [
        ("os._exit(0)", "its process ended with exit status 0"),
        ("os.kill(os.getpid(), signal.SIGKILL)", "its process was killed by SIGKILL"),
    ],
)
def test_a_process_that_dies_is_red_and_takes_nothing_else_along(plugin, capsys, death, reason):
    plugin(DIES_AT_129.format(death=death))
    status, out = table(capsys, "--backend", "mine", "--jobs", "2")
    assert status == 1
    (red,) = (line for line in out.split("\n") if line.startswith("RED "))
    assert red.startswith(f"RED situ, mine, lengths, after 65 tokens: {reason}: error inf")
    families = {line.split()[2] for line in out.split("\n") if line.startswith("situ  mine")}
    assert {"conformance", "poison", "lengths", "regimes", "determinism"} <= families
    with pytest.raises(UnsupportedError, match="is not checked for situ"):
        verdict.read(op_folder(spec("situ")), find("situ", "mine"), "cpu")


SAYS_AND_WAITS = """
import os, signal

def run(*x, **y):
    os.write(1, b"%d\\n" % os.getpid())
    signal.pause()
"""


def test_an_interrupt_ends_every_process(plugin):
    folder = plugin(SAYS_AND_WAITS)
    start = "import sys; from perilune.cli.main import main; sys.exit(main(sys.argv[1:]))"
    command = [sys.executable, "-c", start, *CHECK, "--backend", "mine", "--jobs", "2"]
    run = subprocess.Popen(
        command,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env=os.environ | {"PYTHONPATH": folder},
        start_new_session=True,
    )
    assert run.stdout is not None
    workers = {int(run.stdout.readline()) for _ in range(2)}
    assert len(workers) == 2
    # As a terminal does: to all of them.
    os.killpg(run.pid, signal.SIGINT)
    rest, errors = run.communicate(timeout=60)
    assert (run.returncode, rest, errors) == (130, b"", b"")
    for worker in workers:
        with pytest.raises(ProcessLookupError):
            os.kill(worker, 0)


@pytest.mark.parametrize("jobs", ["0", "-1", "x", "1.5"])
def test_a_wrong_number_of_processes_is_a_usage_error(jobs, capsys):
    with pytest.raises(SystemExit) as stop:
        main([*CHECK, f"--jobs={jobs}"])
    assert stop.value.code == 2
    assert "must be a whole number from 1 up" in capsys.readouterr().err
