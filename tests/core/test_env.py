"""The environment variables that perilune reads."""

from __future__ import annotations

from pathlib import Path

import pytest

from perilune.core.env import cache_dir, kernel_choices, num_threads
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


@pytest.mark.parametrize(
    ("value", "choices"),
    [
        ("", {}),
        ("kda_chunk=fla", {"kda_chunk": "fla"}),
        (" situ = mine , kda_chunk=fla,", {"situ": "mine", "kda_chunk": "fla"}),
    ],
)
def test_kernel_choices(monkeypatch, value, choices):
    monkeypatch.setenv("PERILUNE_KERNELS", value)
    assert kernel_choices() == choices


@pytest.mark.parametrize("value", ["fla", "=fla", "kda_chunk=", " ", "situ=a,,b"])
def test_a_kernel_choice_of_another_form_is_refused(monkeypatch, value):
    monkeypatch.setenv("PERILUNE_KERNELS", value)
    with pytest.raises(ConfigError, match="PERILUNE_KERNELS must be OP=BACKEND"):
        kernel_choices()


def test_two_choices_for_one_op_are_refused(monkeypatch):
    monkeypatch.setenv("PERILUNE_KERNELS", "situ=a,situ=b")
    with pytest.raises(ConfigError, match="chooses a backend for situ twice"):
        kernel_choices()


def test_the_cache_follows_xdg(monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", "/somewhere")
    assert cache_dir() == Path("/somewhere/perilune")
    monkeypatch.setenv("XDG_CACHE_HOME", "")
    assert cache_dir() == Path.home() / ".cache" / "perilune"
