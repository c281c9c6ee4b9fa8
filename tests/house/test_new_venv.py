"""The first step of `make serve` on a bare machine: what is missing is told in one line."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[2] / "scripts" / "new_venv"

BARE_PYTHON = """#!/bin/sh
case "$*" in
    *"import ensurepip"*) [ -e "$0.has_venv" ] ;;
    *print*) echo python3.11-venv ;;
    "-m venv "*) mkdir "$3" ;;
esac
"""


@pytest.fixture
def machine(tmp_path):
    """A machine of stubs: Debian's python3 without its venv package, apt-get, a user id."""

    def machine(*, user_id: int = 1000, **stubs: str) -> subprocess.CompletedProcess:
        commands = {"python3": BARE_PYTHON, "id": f"#!/bin/sh\necho {user_id}\n", **stubs}
        for name, text in commands.items():
            (tmp_path / name.replace("_", "-")).write_text(text)
            (tmp_path / name.replace("_", "-")).chmod(0o755)
        return subprocess.run(
            [SCRIPT, tmp_path / "venv"],
            env={"PATH": f"{tmp_path}:{os.environ['PATH']}"},
            capture_output=True,
            text=True,
        )

    return machine


def test_without_rights_the_package_is_named(machine, tmp_path):
    done = machine()
    assert done.returncode == 1
    assert done.stderr == (
        "perilune: python3 cannot make virtual environments: "
        "run  sudo apt-get install python3.11-venv\n"
    )
    assert not (tmp_path / "venv").exists()


def test_root_gets_the_package_installed(machine, tmp_path):
    apt = f'#!/bin/sh\necho "$@" >>{tmp_path}/asked\ntouch {tmp_path}/python3.has_venv\n'
    done = machine(user_id=0, apt_get=apt)
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "asked").read_text().splitlines()[-1] == "install -qqy python3.11-venv"
    assert (tmp_path / "venv").is_dir()


def test_a_failed_installation_is_told(machine):
    done = machine(user_id=0, apt_get="#!/bin/sh\nexit 100\n")
    assert done.returncode == 1
    assert done.stderr.startswith("perilune: apt-get could not install python3.11-venv")


def test_an_old_python_is_told(machine):
    done = machine(python3="#!/bin/sh\nexit 1\n")
    assert done.returncode == 1
    assert "older than Python 3.11" in done.stderr
    assert done.stderr.count("\n") == 1


def test_no_python_is_told(tmp_path):
    done = subprocess.run(
        [SCRIPT, tmp_path / "venv"],
        env={**os.environ, "PYTHON": "no-such-python"},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 1
    assert done.stderr.startswith("perilune: there is no no-such-python;")
