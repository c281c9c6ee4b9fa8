"""What is built from the tree holds every file of the package, Python or not."""

from __future__ import annotations

import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PACKAGE = ROOT / "src" / "perilune"
KINDS = (".cu", ".cuh", ".py", ".txt", ".json")


@pytest.fixture(scope="module")
def built(tmp_path_factory) -> Path:
    out = tmp_path_factory.mktemp("dist")
    command = [sys.executable, "-m", "hatchling", "build", "-d", str(out)]
    run = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stderr
    return out


@pytest.fixture(scope="module")
def wanted() -> set[str]:
    found = {str(path.relative_to(PACKAGE)) for path in PACKAGE.rglob("*") if path.suffix in KINDS}
    assert {"kernels/mla/cuda_decode.cu", "kernels/common/cuda_hopper.cuh"} <= found
    return found


def test_the_wheel_is_whole(built, wanted):
    (wheel,) = built.glob("*.whl")
    with zipfile.ZipFile(wheel) as held:
        assert wanted <= {name.removeprefix("perilune/") for name in held.namelist()}


def test_the_source_archive_is_whole(built, wanted):
    (archive,) = built.glob("*.tar.gz")
    with tarfile.open(archive) as held:
        names = {name.partition("/src/perilune/")[2] for name in held.getnames()}
    assert wanted <= names
