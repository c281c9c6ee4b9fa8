"""The environment variables that perilune reads."""

from __future__ import annotations

import pytest

from perilune.core.env import num_threads
from perilune.core.errors import ConfigError


@pytest.mark.parametrize(("value", "threads"), [("", None), ("1", 1), ("12", 12)])
def test_threads(monkeypatch, value, threads):
    monkeypatch.setenv("PERILUNE_THREADS", value)
    assert num_threads() == threads


@pytest.mark.parametrize("value", ["0", "-1", "abc", "1.5"])
def test_threads_that_are_no_number_are_refused(monkeypatch, value):
    monkeypatch.setenv("PERILUNE_THREADS", value)
    with pytest.raises(ConfigError, match=f"PERILUNE_THREADS .* not '{value}'"):
        num_threads()
