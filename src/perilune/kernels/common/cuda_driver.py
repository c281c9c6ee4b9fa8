"""NVIDIA's driver, as far as kernels in CUDA C++ need it: loading, launching, tensor maps.

By ctypes on the library that torch has loaded. `cuda-bindings` has the same calls, but makes tensor
maps in Python objects of 16 bytes' alignment, where the driver wants 64.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from functools import cache, lru_cache
from typing import Any, NamedTuple

import torch

from perilune.kernels.common.errors import DriverError

_MAX_SHARED_BYTES = 8  # CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
_BF16, _NO_INTERLEAVE, _SWIZZLE_128B, _PROMOTE_128B, _ZEROS = 9, 0, 3, 2, 0
_STREAM_SERIALIZATION = 6  # CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION
_MAP_BYTES, _MAP_ALIGNMENT = 128, 64
Argument = (
    ctypes.c_void_p | ctypes.c_int | ctypes.c_float | ctypes.Array[ctypes.c_char] | ctypes.Structure
)
"""As the kernel takes it: a pointer, a number, a tensor map, or a struct of such."""


class Kernel(NamedTuple):
    """Of the device that was current when it was loaded."""

    handle: ctypes.c_void_p
    threads: int
    shared_bytes: int


def load(code: bytes, name: str, threads: int, shared_bytes: int) -> Kernel:
    """The kernel `name` of a cubin, on the current device, with that much dynamic shared memory.

    It stays loaded as long as the process lives: graphs hold its address.

    Raises:
        DriverError: the code is for another GPU, has no such kernel, or wants too much memory.
    """
    _bind_context()
    module, handle = ctypes.c_void_p(), ctypes.c_void_p()
    _call("cuModuleLoadData", ctypes.byref(module), code)
    _call("cuModuleGetFunction", ctypes.byref(handle), module, name.encode())
    _call("cuFuncSetAttribute", handle, _MAX_SHARED_BYTES, shared_bytes)
    return Kernel(handle, threads, shared_bytes)


def launch(
    kernel: Kernel, programs: int, arguments: Sequence[Argument], *, early: bool = False
) -> None:
    """On the current stream of the current device; the arguments' values are copied.

    `early`: it is set up while the kernel before it ends, and waits for that itself.

    Raises:
        DriverError: it is not launched.
    """
    _bind_context()
    addresses = (ctypes.c_void_p * len(arguments))(*map(ctypes.addressof, arguments))
    stream = torch.cuda.current_stream().cuda_stream
    attribute = _Attribute(_STREAM_SERIALIZATION, 1)
    config = _Launch(
        (programs, 1, 1),
        (kernel.threads, 1, 1),
        kernel.shared_bytes,
        stream,
        ctypes.pointer(attribute),
        int(early),
    )
    _call("cuLaunchKernelEx", ctypes.byref(config), kernel.handle, addresses, None)


class _Attribute(ctypes.Structure):
    """CUlaunchAttribute with a number for a value."""

    _fields_ = (
        ("id", ctypes.c_int),
        ("_gap", ctypes.c_char * 4),
        ("value", ctypes.c_int),
        ("_rest", ctypes.c_char * 60),
    )

    def __init__(self, id: int, value: int) -> None:
        super().__init__(id=id, value=value)


class _Launch(ctypes.Structure):
    """CUlaunchConfig."""

    _fields_ = (
        ("grid", ctypes.c_uint * 3),
        ("block", ctypes.c_uint * 3),
        ("shared_bytes", ctypes.c_uint),
        ("stream", ctypes.c_void_p),
        ("attributes", ctypes.POINTER(_Attribute)),
        ("num_attributes", ctypes.c_uint),
    )


@lru_cache(maxsize=256)
def rows_in_boxes(
    address: int, rows: int, width: int, row_bytes: int, box: tuple[int, int]
) -> ctypes.Array[ctypes.c_char]:
    """The tensor map of `rows` of bf16 [rows, width] at `address`, `row_bytes` apart, of which the
    copy engine fetches boxes of (rows, channels), swizzled by 128 bytes. What lies outside is zero.

    It depends on the numbers alone, whatever lies there: the same ones get the same map.

    Raises:
        DriverError: no such map can be made: something is not aligned to 16 bytes.
    """
    room = ctypes.create_string_buffer(_MAP_BYTES + _MAP_ALIGNMENT)
    map_ = (ctypes.c_char * _MAP_BYTES).from_buffer(room, -ctypes.addressof(room) % _MAP_ALIGNMENT)
    _call(
        "cuTensorMapEncodeTiled",
        map_,
        _BF16,
        2,
        ctypes.c_void_p(address),
        (ctypes.c_uint64 * 2)(width, rows),
        (ctypes.c_uint64 * 1)(row_bytes),
        (ctypes.c_uint32 * 2)(box[1], box[0]),
        (ctypes.c_uint32 * 2)(1, 1),
        _NO_INTERLEAVE,
        _SWIZZLE_128B,
        _PROMOTE_128B,
        _ZEROS,
    )
    return map_


def _bind_context() -> None:
    """To this thread, that of torch's device: a thread in which nothing ran on it has none yet."""
    context, device = ctypes.c_void_p(), ctypes.c_int()
    _call("cuCtxGetCurrent", ctypes.byref(context))
    if context.value is None:
        _call("cuDeviceGet", ctypes.byref(device), torch.cuda.current_device())
        _call("cuDevicePrimaryCtxRetain", ctypes.byref(context), device)
        _call("cuCtxSetCurrent", context)


@cache
def _driver() -> Any:
    return ctypes.CDLL("libcuda.so.1")


def _call(name: str, *arguments: Any) -> None:
    status = getattr(_driver(), name)(*arguments)
    if status:
        text = ctypes.c_char_p()
        _driver().cuGetErrorName(status, ctypes.byref(text))
        raise DriverError(f"{name}: {(text.value or b'an unknown error').decode()} ({status})")
