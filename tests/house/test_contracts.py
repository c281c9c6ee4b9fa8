"""The import contracts hold, and would notice a breach."""

from __future__ import annotations

import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PACKAGE = ROOT / "src" / "perilune"

BREACHES = {
    "upward": ("kernels/breach.py", "import perilune.model.model"),
    "between_siblings": ("gateway/breach.py", "import perilune.engine.errors"),
    "torch_in_the_front": ("text/breach.py", "import torch"),
    "torch_behind_another_room": ("core/breach.py", "import perilune.kernels.registry"),
    "text_in_the_engine": ("engine/breach.py", "import perilune.text.errors"),
    "a_room_without_a_place": ("attic/__init__.py", ""),
}


@pytest.fixture
def copy(tmp_path) -> Path:
    """The package and its contracts, free to be broken."""
    ignored = shutil.ignore_patterns("__pycache__")
    shutil.copytree(PACKAGE, tmp_path / "src" / "perilune", ignore=ignored)
    shutil.copy(ROOT / "pyproject.toml", tmp_path)
    return tmp_path


def lint(directory: Path) -> subprocess.CompletedProcess:
    script = (
        f"import sys; sys.path.insert(0, {str(directory / 'src')!r});"
        "from importlinter.cli import lint_imports; sys.exit(lint_imports(no_cache=True))"
    )
    return subprocess.run(
        [sys.executable, "-c", script], cwd=directory, capture_output=True, text=True
    )


def test_the_contracts_hold(copy):
    done = lint(copy)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize(("path", "line"), BREACHES.values(), ids=BREACHES)
def test_a_breach_is_noticed(copy, path, line):
    file = copy / "src" / "perilune" / path
    file.parent.mkdir(exist_ok=True)
    file.write_text(line + "\n")
    done = lint(copy)
    assert done.returncode == 1, done.stdout + done.stderr


def test_every_room_is_placed():
    with (ROOT / "pyproject.toml").open("rb") as file:
        layers = tomllib.load(file)["tool"]["importlinter"]["contracts"][0]["layers"]
    placed = {room for layer in layers for room in layer.split(" | ")}
    assert placed == {path.parent.name for path in PACKAGE.glob("*/__init__.py")}
