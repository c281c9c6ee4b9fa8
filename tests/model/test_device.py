"""Which device a name stands for, on machines with and without a GPU."""

from __future__ import annotations

import pytest
import torch

from perilune.core.errors import UnsupportedError
from perilune.model import device
from perilune.model.device import device_of


@pytest.fixture
def machine(monkeypatch):
    def machine(*, gpu: bool, built: bool = True, triton: bool = True) -> None:
        monkeypatch.setattr(torch.cuda, "is_available", lambda: gpu)
        monkeypatch.setattr(torch.backends.cuda, "is_built", lambda: built)
        monkeypatch.setattr(device, "find_spec", lambda name: object() if triton else None)

    return machine


@pytest.mark.parametrize(
    ("facts", "chosen"),
    [
        ({"gpu": True}, "cuda"),
        ({"gpu": True, "triton": False}, "cpu"),
        ({"gpu": False}, "cpu"),
    ],
)
def test_auto_takes_a_gpu_that_is_ready(machine, facts, chosen):
    machine(**facts)
    assert device_of("auto") == torch.device(chosen)


@pytest.mark.parametrize(
    ("facts", "why"),
    [
        ({"gpu": False}, "torch sees no GPU"),
        ({"gpu": False, "built": False}, "build of torch is for CPUs only"),
        ({"gpu": True, "triton": False}, "need triton"),
    ],
)
@pytest.mark.parametrize("name", ["cuda", "cuda:1"])
def test_a_gpu_that_is_asked_for_and_not_ready_is_one_sentence(machine, facts, why, name):
    machine(**facts)
    with pytest.raises(UnsupportedError, match=f"device '{name}' cannot be used: .*{why}"):
        device_of(name)


def test_the_cpu_asks_for_nothing(machine):
    machine(gpu=False, built=False, triton=False)
    assert device_of("cpu") == torch.device("cpu")
