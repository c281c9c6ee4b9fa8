"""A file is replaced at once, or not at all."""

from __future__ import annotations

from pathlib import Path

import pytest

from perilune.core.whole_file import write_whole


def test_the_new_content_stands_where_the_old_did_and_nothing_else_is_left(tmp_path):
    path = tmp_path / "file.json"
    for content in (b"old", b"new"):
        write_whole(path, content)
        assert path.read_bytes() == content
        assert list(tmp_path.iterdir()) == [path]


def test_a_write_that_fails_leaves_the_old_content(tmp_path, monkeypatch):
    path = tmp_path / "file.json"
    write_whole(path, b"old")

    def half(self, content):
        with self.open("wb") as file:
            file.write(content[:1])
        raise OSError("no space left on device")

    monkeypatch.setattr(Path, "write_bytes", half)
    with pytest.raises(OSError, match="no space"):
        write_whole(path, b"new")
    assert path.read_bytes() == b"old"
