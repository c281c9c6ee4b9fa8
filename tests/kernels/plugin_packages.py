"""Packages that bring a backend: the example as pip installs it, and small ones made in a test."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

EXAMPLE = Path(__file__).with_name("example_plugin")


def pip_install(folder: Path, version: str) -> Path:
    """The example, of that version, installed into a folder of its own."""
    source, target = folder / f"source-{version}", folder / f"installed-{version}"
    shutil.copytree(EXAMPLE, source)
    settings = source / "pyproject.toml"
    text = settings.read_text()
    assert 'version = "1.0"' in text
    settings.write_text(text.replace('version = "1.0"', f'version = "{version}"'))
    quiet = ["-q", "--disable-pip-version-check", "--no-index", "--no-deps", "--no-build-isolation"]
    command = [sys.executable, "-m", "pip", "install", *quiet, "--target", target, source]
    subprocess.run(command, check=True, timeout=120)
    return target


HEAD = """
import torch
from perilune.core.errors import UnsupportedError
from perilune.kernels.plugins import Plugin

PLUGIN = Plugin(op="situ", run="{package}:run", devices=("cpu",){claims})

def true(gate_up_2I, beta, linear_beta):
    gate, up = gate_up_2I.float().chunk(2, dim=-1)
    up = up if linear_beta is None else linear_beta * (up / linear_beta).tanh()
    gate_up_2I = gate if beta is None else beta * (gate / beta).tanh()
    return gate_up_2I * gate.sigmoid() * up

"""


def make(
    folder: Path,
    package: str,
    body: str,
    *,
    claims: str = "",
    backend: str = "mine",
    version: str = "1.0",
) -> Path:
    """A package of one module whose `run` is `body`, that registers itself for op `situ`."""
    folder.mkdir(parents=True, exist_ok=True)
    claims = f", {claims}" if claims else ""
    (folder / f"{package}.py").write_text(HEAD.format(package=package, claims=claims) + body)
    info = folder / f"{package}-{version}.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {package}\nVersion: {version}\n")
    entry = f"[perilune.kernels]\n{backend} = {package}:PLUGIN\n"
    (info / "entry_points.txt").write_text(entry)
    return folder
