"""MLA decode in CUDA C++ as far as a CPU can tell: what it serves, how it is compiled and run."""

from __future__ import annotations

import ctypes
import re
import sys
from enum import IntEnum
from types import ModuleType

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from perilune.kernels.common import cuda_driver, nvrtc
from perilune.kernels.common.cuda_driver import Kernel
from perilune.kernels.common.errors import CompileError, DriverError
from perilune.kernels.common.triton_math import LOG2_E
from perilune.kernels.mla import cuda_decode, triton_decode
from perilune.kernels.mla.triton_decode import launch_of, plan_for
from perilune.kernels.mla.triton_decode_plain import launch as plain_launch
from perilune.kernels.mla.triton_decode_plan import Parts, plan_of
from perilune.kernels.mla.triton_decode_roles import launch as roles_launch
from perilune.kernels.mla.triton_decode_rows import Rows

SHARED_OF_HOPPER = 232_448
"""Bytes that a program may have, by NVIDIA's tuning guide for Hopper: 227 KiB."""


class OnGpu:
    """What is asked of queries before they are used."""

    device = torch.device("cuda", 0)

    def __init__(self, heads=96, dtype=torch.bfloat16, address=64, queries=1):
        self.shape, self.dtype = torch.Size((2, queries, heads, 576)), dtype
        self.data_ptr = lambda: address


def cached(dtype=torch.bfloat16, page=64):
    pool_PSC = torch.zeros(3, page, 576, dtype=dtype)
    table, length = torch.zeros(2, 2, dtype=torch.int32), torch.ones(2, dtype=torch.int32)
    return Rows(pool_PSC[..., :512], pool_PSC[..., 512:], None, table, length)


@pytest.fixture
def machine(monkeypatch):
    """A GPU of that capability, with or without `cuda-bindings`, of NVIDIA or not."""

    def set_up(capability=(9, 0), library=True, nvidia="13.0"):
        monkeypatch.setattr(torch.version, "cuda", nvidia)
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
        monkeypatch.setattr(nvrtc, "is_installed", lambda: library)
        for found in (cuda_decode.is_available, triton_decode.has_roles):
            found.cache_clear()

    yield set_up
    for found in (cuda_decode.is_available, triton_decode.has_roles):
        found.cache_clear()


@pytest.fixture
def roles(monkeypatch):
    monkeypatch.setattr(triton_decode.triton, "__version__", "3.6.0")


@pytest.mark.usefixtures("roles")
@pytest.mark.parametrize(
    ("given", "rows", "launch"),
    [
        (OnGpu(), cached(), cuda_decode.launch),
        (OnGpu(192, queries=3), cached(page=128), cuda_decode.launch),
        (OnGpu(64), cached(), roles_launch),
        (OnGpu(128), cached(), roles_launch),
        (OnGpu(48, queries=2), cached(), roles_launch),
        (OnGpu(address=72), cached(), plain_launch),
        (OnGpu(), cached(page=50), plain_launch),
        (OnGpu(dtype=torch.float32), cached(torch.float32), plain_launch),
    ],
)
def test_whole_tiles_of_heads_in_boxes_are_served(given, rows, launch, machine):
    machine()
    assert launch_of(given, rows) is launch


@pytest.mark.usefixtures("roles")
@pytest.mark.parametrize(
    ("gpu", "launch"),
    [
        ({"library": False}, roles_launch),
        ({"capability": (8, 0)}, plain_launch),
        ({"capability": (10, 0)}, plain_launch),
        ({"capability": (9, 4), "nvidia": None}, plain_launch),
    ],
    ids=["no compiler", "before Hopper", "after Hopper", "not NVIDIA's"],
)
def test_other_machines_get_other_programs(gpu, launch, machine):
    machine(**gpu)
    assert launch_of(OnGpu(), cached()) is launch


def test_the_cpu_gets_plain_programs(machine):
    machine()
    assert launch_of(torch.zeros(2, 1, 96, 576, dtype=torch.bfloat16), cached()) is plain_launch


@pytest.mark.parametrize(("rows", "teams"), [(96, 132), (192, 66), (288, 44), (96 * 200, 1)])
def test_heads_are_not_padded(rows, teams):
    plan = plan_for(cuda_decode.launch, rows, torch.bfloat16, 132)
    assert (plan.block, plan.tokens, plan.teams) == (96, 64, teams)
    assert plan.programs == teams * rows // 96


@given(st.integers(1, 40), st.integers(1, 200))
def test_a_plan_fits(tiles, programs):
    found = cuda_decode.plan_of(96 * tiles, programs)
    assert found.programs == found.teams * tiles <= max(programs, tiles)


def test_other_programs_keep_their_plan():
    assert plan_for(plain_launch, 96, torch.bfloat16, 132) is plan_of(96, torch.bfloat16, 132)


def test_shared_memory_is_no_more_than_there_is():
    assert cuda_decode.SHARED_BYTES <= SHARED_OF_HOPPER
    assert "<= SHARED_BYTES" in cuda_decode.SOURCE.read_text()


def test_the_source_reads_what_is_defined_and_no_other_header():
    text = cuda_decode.SOURCE.read_text()
    assert all(re.search(rf"\b{name}\b", text) for name in cuda_decode.defined())
    assert re.findall(r"#include (.+)", text) == [f'"{cuda_decode.HEADERS[0].name}"']
    assert "#include" not in cuda_decode.HEADERS[0].read_text()


class Status(IntEnum):
    NVRTC_SUCCESS = 0
    NVRTC_ERROR_COMPILATION = 6


class FakeNvrtc(ModuleType):
    """Answers as `cuda.bindings.nvrtc` does; a source with "wrong" in it is refused."""

    nvrtcResult = Status

    def __init__(self):
        super().__init__("cuda.bindings.nvrtc")
        self.compiled, self.destroyed = [], 0

    def nvrtcVersion(self):
        return Status.NVRTC_SUCCESS, 13, 0

    def nvrtcCreateProgram(self, source, name, count, headers, names):
        assert (count, len(headers)) == (len(names), len(names))
        return Status.NVRTC_SUCCESS, source

    def nvrtcCompileProgram(self, program, count, options):
        assert count == len(options)
        self.compiled.append(options)
        refused = b"wrong" in program
        return (Status.NVRTC_ERROR_COMPILATION if refused else Status.NVRTC_SUCCESS,)

    def nvrtcGetProgramLogSize(self, program):
        return Status.NVRTC_SUCCESS, 0

    def nvrtcGetProgramLog(self, program, log):
        return (Status.NVRTC_SUCCESS,)

    def nvrtcGetCUBINSize(self, program):
        return Status.NVRTC_SUCCESS, 3

    def nvrtcGetCUBIN(self, program, code):
        return (Status.NVRTC_SUCCESS,)

    def nvrtcDestroyProgram(self, program):
        self.destroyed += 1
        return (Status.NVRTC_SUCCESS,)


@pytest.fixture
def compiler(monkeypatch, tmp_path):
    fake = FakeNvrtc()
    monkeypatch.setattr(nvrtc, "import_module", lambda name: fake)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return fake


def test_code_is_kept_for_what_it_was_made_of(compiler, tmp_path):
    source, header = tmp_path / "a.cu", tmp_path / "a.cuh"
    source.write_text("one")
    header.write_text("two")
    made = [nvrtc.cubin(source, (header,), {"A": 1}, "sm_90a") for _ in range(2)]
    assert made[0] == made[1]
    assert compiler.compiled == [
        [b"--gpu-architecture=sm_90a", b"--std=c++17", b"--define-macro=A=1"]
    ]
    nvrtc.cubin(source, (header,), {"A": 2}, "sm_90a")
    header.write_text("three")
    nvrtc.cubin(source, (header,), {"A": 2}, "sm_90a")
    assert len(compiler.compiled) == compiler.destroyed == 3


def test_a_source_that_is_refused_is_named_and_not_kept(compiler, tmp_path):
    source = tmp_path / "a.cu"
    source.write_text("wrong")
    for _ in range(2):
        with pytest.raises(CompileError, match=r"a\.cu does not compile"):
            nvrtc.cubin(source, (), {}, "sm_90a")
    assert compiler.destroyed == 2


def refuse(*_):
    raise PermissionError("no right to write here")


def blocked(folder, monkeypatch):
    (folder / "cache").touch()


def read_only(folder, monkeypatch):
    monkeypatch.setattr(nvrtc, "write_whole", refuse)


def unreadable(folder, monkeypatch):
    monkeypatch.setattr(nvrtc.Path, "read_bytes", lambda path: refuse())


@pytest.mark.parametrize("hinder", [blocked, read_only, unreadable])
def test_code_that_cannot_be_kept_is_compiled_and_one_warning_tells(
    hinder, compiler, tmp_path, monkeypatch, caplog
):
    source = tmp_path / "a.cu"
    source.write_text("one")
    read = source.read_bytes()
    hinder(tmp_path, monkeypatch)
    if hinder is unreadable:
        # The source itself can still be read.
        monkeypatch.setattr(nvrtc, "_digest", lambda *_: "digest")
        monkeypatch.setattr(nvrtc, "_compiled", lambda *_: compiler.compiled.append([]) or read)
    nvrtc._warn_once.cache_clear()
    made = [nvrtc.cubin(source, (), {}, "sm_90a") for _ in range(2)]
    assert made[0] == made[1]
    assert len(compiler.compiled) == 2
    (told,) = caplog.records
    assert told.levelname == "WARNING"
    assert str(tmp_path / "cache") in told.getMessage()


@pytest.mark.parametrize("library", ["cuda", "cuda.bindings", None])
def test_the_library_is_found_without_an_import(library, monkeypatch):
    monkeypatch.setattr(nvrtc, "find_spec", lambda name: None if name == library else object())
    assert nvrtc.is_installed() == (library is None)
    assert "cuda.bindings" not in sys.modules


class FakeDriver:
    """Keeps what it is called with; refuses every call in `refused`."""

    def __init__(self, refused=()):
        self.calls, self.refused, self.context = [], refused, False

    def __getattr__(self, name):
        def call(*arguments):
            self.calls.append((name, arguments))
            if name == "cuGetErrorName":
                arguments[1]._obj.value = b"CUDA_ERROR_INVALID_VALUE"
            if name == "cuCtxGetCurrent":
                arguments[0]._obj.value = 7 if self.context else None
            self.context |= name == "cuCtxSetCurrent"
            return 1 if name in self.refused else 0

        return call

    def named(self, name):
        return [arguments for called, arguments in self.calls if called == name]


@pytest.fixture
def driver(monkeypatch):
    class Stream:
        cuda_stream = 5

    fake = FakeDriver()
    monkeypatch.setattr(cuda_driver, "_driver", lambda: fake)
    monkeypatch.setattr(torch.cuda, "current_stream", Stream)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    cuda_driver.rows_in_boxes.cache_clear()
    yield fake
    cuda_driver.rows_in_boxes.cache_clear()


def test_a_map_is_aligned_and_made_once(driver):
    made = [cuda_driver.rows_in_boxes(64, 8 + i // 2, 576, 1152, (96, 64)) for i in range(4)]
    assert all(ctypes.addressof(map_) % 64 == 0 for map_ in made)
    assert made[0] is made[1]
    first, _ = driver.named("cuTensorMapEncodeTiled")
    assert first[3].value == 64
    assert [list(x) for x in first[4:8]] == [[576, 8], [1152], [64, 96], [1, 1]]


def test_what_the_driver_refuses_is_told(driver):
    driver.refused = ("cuTensorMapEncodeTiled",)
    with pytest.raises(DriverError, match="cuTensorMapEncodeTiled: CUDA_ERROR_INVALID_VALUE"):
        cuda_driver.rows_in_boxes(64, 8, 576, 1152, (96, 64))


def test_a_thread_without_a_context_gets_torchs(driver):
    cuda_driver.load(b"code", "attend", 256, 1000)
    cuda_driver.load(b"code", "attend", 256, 1000)
    assert len(driver.named("cuCtxSetCurrent")) == 1
    assert driver.named("cuFuncSetAttribute")[0][1:] == (8, 1000)


def test_programs_are_started_with_what_the_source_takes(driver, monkeypatch):
    monkeypatch.setattr(
        cuda_decode, "kernel_of", lambda device: Kernel(ctypes.c_void_p(3), 256, 1000)
    )
    told = []

    def read(values):
        told.extend(values)
        return values

    rows, q_NQHC = cached(page=128), torch.zeros(2, 2, 192, 576, dtype=torch.bfloat16)
    parts = Parts(*(torch.zeros(1) for _ in range(3)))
    plan = cuda_decode.plan_of(384, 132)
    launched = cuda_driver.launch
    monkeypatch.setattr(
        cuda_decode, "launch_kernel", lambda kernel, n, x: launched(kernel, n, read(x))
    )
    cuda_decode.launch(q_NQHC, rows, parts, 0.5, plan)
    (started,) = driver.named("cuLaunchKernelEx")
    config = started[0]._obj
    assert [*config.grid, *config.block, config.shared_bytes] == [
        *(plan.programs, 1, 1),
        *(256, 1, 1),
        1000,
    ]
    assert (config.stream, config.num_attributes) == (5, 0)
    pointers = (rows.table_NW, rows.length_N, *parts)
    assert [x.value for x in told[2:7]] == [x.data_ptr() for x in pointers]
    assert [x.value for x in told[7:16]] == [2, 256, plan.teams, 384, 128, 2, 128, 2, 192]
    assert told[16].value == pytest.approx(0.5 * LOG2_E.value)
    declared = cuda_decode.SOURCE.read_text().rpartition("attend(")[2].partition(")")[0]
    assert len(told) == len(declared.split(","))
