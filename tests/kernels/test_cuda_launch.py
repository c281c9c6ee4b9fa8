"""A launch by NVIDIA's driver is told in the driver's own layout."""

from __future__ import annotations

import ctypes

import pytest
import torch

from perilune.kernels.common import cuda_driver
from perilune.kernels.common.cuda_driver import Kernel


def offsets(struct):
    return {name: getattr(struct, name).offset for name, *_ in struct._fields_}


def test_a_launch_is_laid_out_as_the_driver_has_it():
    """CUlaunchConfig and CUlaunchAttribute of cuda.h, where pointers have 64 bits."""
    assert offsets(cuda_driver._Launch) == {
        "grid": 0,
        "block": 12,
        "shared_bytes": 24,
        "stream": 32,
        "attributes": 40,
        "num_attributes": 48,
    }
    assert ctypes.sizeof(cuda_driver._Launch) == 56
    found = offsets(cuda_driver._Attribute)
    assert (found["id"], found["value"], ctypes.sizeof(cuda_driver._Attribute)) == (0, 8, 72)


@pytest.mark.parametrize("early", [False, True])
def test_a_launch_is_early_where_that_is_asked_for(early, monkeypatch):
    class Stream:
        cuda_stream = 5

    calls = []
    monkeypatch.setattr(cuda_driver, "_call", lambda *given: calls.append(given))
    monkeypatch.setattr(cuda_driver, "_bind_context", lambda: None)
    monkeypatch.setattr(torch.cuda, "current_stream", Stream)
    given = ctypes.c_void_p(64), ctypes.c_int(7)
    cuda_driver.launch(Kernel(ctypes.c_void_p(3), 256, 1000), 12, given, early=early)
    ((name, config, handle, arguments, extra),) = calls
    assert (name, handle.value, extra) == ("cuLaunchKernelEx", 3, None)
    assert list(arguments) == [*map(ctypes.addressof, given)]
    told = config._obj
    assert [*told.grid, *told.block] == [12, 1, 1, 256, 1, 1]
    assert (told.shared_bytes, told.stream, told.num_attributes) == (1000, 5, int(early))
    # CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION
    assert (told.attributes[0].id, told.attributes[0].value) == (6, 1)
