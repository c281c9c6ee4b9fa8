"""Kept machine code: of these sources only, and nothing stops where it cannot be kept."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from perilune.kernels.common import jit_cache

RUN = """
import logging
logging.basicConfig(level=logging.WARNING)
import torch
from perilune.kernels.situ.cpu import situ_glu
with torch.no_grad():
    print(situ_glu(torch.ones(1, 2), None, None).item())
"""


def run(tmp_path: Path, **env: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", RUN],
        env=os.environ | env,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )


def test_every_loop_s_source_is_in_the_folder_s_name(tmp_path):
    names = {path.parent.name + "/" + path.name for path in jit_cache.sources()}
    assert {"common/cpu_jit.py", "linear/cpu.py", "kda_step/cpu.py", "experts/cpu.py"} <= names
    files = []
    for source in jit_cache.sources():
        files.append(tmp_path / source.parent.name / source.name)
        files[-1].parent.mkdir(exist_ok=True)
        files[-1].write_bytes(source.read_bytes())
    assert jit_cache.folder(files) == jit_cache.folder(jit_cache.sources())
    for file in files:
        before = file.read_bytes()
        file.write_bytes(before + b"\n")
        assert jit_cache.folder(files) != jit_cache.folder(jit_cache.sources()), file
        file.write_bytes(before)


def test_machine_code_is_kept_in_the_cache_folder_of_the_user(tmp_path):
    done = run(tmp_path, XDG_CACHE_HOME=str(tmp_path))
    assert done.returncode == 0, done.stderr
    assert list((tmp_path / "perilune").rglob("cpu._situ_glu*.nbc"))


def test_without_a_place_to_keep_it_the_loops_run_all_the_same(tmp_path):
    blocked = tmp_path / "file"
    blocked.touch()
    done = run(tmp_path, XDG_CACHE_HOME=str(blocked))
    assert done.returncode == 0, done.stderr
    assert abs(float(done.stdout) - 0.7310586) < 1e-6
    assert "compiled loops are not kept" in done.stderr
