"""Files of the off-card tier: whole or not there, and nobody else's."""

from __future__ import annotations

import subprocess
import sys

import numpy as np
import pytest

from perilune.engine.cache_files import CacheFileError, CacheFiles

CONTENT = np.arange(100, dtype=np.uint8)


@pytest.fixture
def files(tmp_path):
    files = CacheFiles(tmp_path)
    files.write(7, CONTENT)
    yield files
    if files.folder.exists():
        files.close()


def read(files: CacheFiles, number: int = 7, size: int = 100) -> np.ndarray:
    out = np.zeros(size, np.uint8)
    files.read(number, out)
    return out


def test_what_was_written_is_read(files):
    assert (read(files) == CONTENT).all()
    assert files.path(7).stat().st_size == files.file_bytes(100)
    assert [path.name for path in files.folder.iterdir() if path.name != "lock"] == ["7.cache"]


def test_every_flipped_byte_is_seen(files):
    whole = files.path(7).read_bytes()
    for at in range(len(whole)):
        files.path(7).write_bytes(whole[:at] + bytes([whole[at] ^ 1]) + whole[at + 1 :])
        with pytest.raises(CacheFileError, match=r"7\.cache is damaged"):
            read(files)


@pytest.mark.parametrize("change", [lambda b: b[:-1], lambda b: b + b"\0", lambda b: b""])
def test_another_length_is_seen(files, change):
    files.path(7).write_bytes(change(files.path(7).read_bytes()))
    with pytest.raises(CacheFileError):
        read(files)


def test_the_file_of_another_entry_is_seen(files):
    files.path(7).rename(files.path(8))
    with pytest.raises(CacheFileError):
        read(files, 8)
    with pytest.raises(OSError, match="No such file"):
        read(files, 7)


def test_the_file_of_another_run_is_seen(files, tmp_path):
    other = CacheFiles(tmp_path)
    files.path(7).rename(other.path(7))
    with pytest.raises(CacheFileError):
        read(other)
    other.close()


def test_a_file_is_whole_or_not_there(files, monkeypatch):
    def fails(self, number, content):
        raise OSError("no space left")

    monkeypatch.setattr(CacheFiles, "_header", fails)
    with pytest.raises(OSError, match="no space left"):
        files.write(9, CONTENT)
    assert {path.name for path in files.folder.iterdir()} == {"lock", "7.cache"}


def test_a_run_leaves_nothing(files, tmp_path):
    files.remove(7)
    files.remove(7)
    files.write(8, CONTENT)
    files.close()
    assert [path.name for path in tmp_path.iterdir()] == ["lock"]


def test_leftovers_go_and_what_is_in_use_or_not_ours_stays(files, tmp_path):
    script = (
        "import sys, numpy, pathlib, os\n"
        "from perilune.engine.cache_files import CacheFiles\n"
        "files = CacheFiles(pathlib.Path(sys.argv[1]))\n"
        "files.write(1, numpy.zeros(9, numpy.uint8))\n"
        "files.path(2).with_suffix('.draft').touch()\n"
        "os._exit(0)\n"  # as if it were killed
    )
    subprocess.run([sys.executable, "-c", script, str(tmp_path)], check=True)
    [left] = [path for path in tmp_path.glob("run-*") if path != files.folder]
    assert {path.name for path in left.iterdir()} == {"lock", "1.cache", "2.draft"}
    (tmp_path / "run-notes.txt").touch()
    (tmp_path / "mine").mkdir()
    third = CacheFiles(tmp_path)
    names = {"lock", "mine", "run-notes.txt", files.folder.name, third.folder.name}
    assert {path.name for path in tmp_path.iterdir()} == names
    assert (read(files) == CONTENT).all()
    third.close()


def test_what_else_lies_in_a_leftover_is_not_touched(tmp_path):
    files = CacheFiles(tmp_path)
    (files.folder / "notes.txt").touch()
    files.close()
    assert [path.name for path in files.folder.iterdir()] == ["notes.txt"]
