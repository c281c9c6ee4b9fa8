"""The source of the experts' products in CUDA C++, and what Python says of it, are of one mind."""

from __future__ import annotations

import ctypes
import re
from contextlib import nullcontext

import pytest
import torch

from perilune.kernels.common import nvrtc
from perilune.kernels.common.cuda_driver import Kernel
from perilune.kernels.experts import cuda_products
from perilune.kernels.experts.cuda_products import FEW, MANY, Work

KIB = 1024
SHARED_OF_HOPPER, RESERVED = 228 * KIB, KIB
"""Of a multiprocessor, and what each program takes of it beside its own, by NVIDIA's tuning guide
for Hopper."""
THREADS_OF_HOPPER, REGISTERS_OF_HOPPER = 2048, 65536
GPU = torch.device("cuda", 0)
TILES = pytest.mark.parametrize("tile", [FEW, MANY], ids=["few", "many"])
SOURCE = cuda_products.SOURCE.read_text()


@TILES
def test_the_source_has_a_program_for_every_eight_tokens(tile):
    (cases,) = re.findall(rf"if MOST == {tile.tokens}\n((?: *CASE\(\d+\)\n)+)", SOURCE)
    widths = [int(width) for width in re.findall(r"\d+", cases)]
    assert widths == list(range(tile.least, tile.tokens + 1, 8))
    for width in widths:
        assert SOURCE.count(f"PRODUCT({width}, ") == 1


def test_operands_are_numbered_as_outputs_are_many():
    """Of n columns, n / 2 numbers of a thread; then four of weights, and the tokens' place and how
    they lie there."""
    found = re.findall(r"^PRODUCT\((\d+), D(\d+), O(\d+), ([\d, ]+)\)$", SOURCE, re.MULTILINE)
    assert len(found) == 12
    for columns, outputs, also_outputs, operands in found:
        n = int(columns) // 2
        assert (int(outputs), int(also_outputs)) == (n, n)
        assert [int(operand) for operand in operands.split(",")] == list(range(n, n + 6))


def test_work_is_the_struct_of_the_source():
    (body,) = re.findall(r"struct Work \{\n(.*?)\n\};", SOURCE, re.DOTALL)
    types = {
        "const char*": ctypes.c_void_p,
        "const int*": ctypes.c_void_p,
        "void*": ctypes.c_void_p,
    }
    types |= {"int": ctypes.c_int, "float": ctypes.c_float}
    declared = []
    for line in body.splitlines():
        kind, names = re.fullmatch(r"\s*((?:const )?\w+\*?) ([\w, ]+);(?:\s*//.*)?", line).groups()
        declared += [(name, types[kind]) for name in names.split(", ")]
    assert declared == list(Work._fields_)
    # Nothing lies between them, in C++ as in ctypes.
    assert ctypes.sizeof(Work) == sum(ctypes.sizeof(kind) for _, kind in declared)


@TILES
def test_what_the_source_reads_is_defined(tile):
    plain = re.sub(r'//.*|"[^"\n]*"', "", SOURCE)
    read = set(re.findall(r"\b[A-Z][A-Z_0-9]+\b", plain))
    declared = set(
        re.findall(r"(?:constexpr \w+|#define|template <.*?bool|int) ([A-Z_0-9]+)", plain)
    )
    for parameters in re.findall(r"template <(.*?)>|#define \w+\((.*?)\)", plain):
        declared |= set(re.findall(r"[A-Z][A-Z_0-9]+", " ".join(parameters)))
    assert "OPERAND" in cuda_products.HEADERS[0].read_text()
    assert read - declared - {"OPERAND"} == cuda_products.defined(tile).keys()
    assert re.findall(r"#include (.+)", SOURCE) == [f'"{cuda_products.HEADERS[0].name}"']
    assert "static_assert(MOST % 8 == 0 && STAGES > 3);" in SOURCE
    assert tile.tokens % 8 == tile.least % 8 == 0
    assert tile.stages > 3


@pytest.fixture
def compiled(monkeypatch):
    """What would be compiled and loaded."""
    found = {}

    def load(code, name, threads, shared_bytes):
        found.update(code=code, name=name, shared_bytes=shared_bytes)
        return Kernel(ctypes.c_void_p(3), threads, shared_bytes)

    monkeypatch.setattr(nvrtc, "cubin", lambda *given: given)
    monkeypatch.setattr(cuda_products, "load", load)
    monkeypatch.setattr(torch.cuda, "device", lambda device: nullcontext())
    return found


@TILES
def test_as_many_programs_as_are_told_fit_on_a_multiprocessor(tile, compiled):
    kernel = cuda_products.kernel_of.__wrapped__("down", tile, GPU)
    assert compiled["name"] == "down"
    assert compiled["code"] == (
        cuda_products.SOURCE,
        cuda_products.HEADERS,
        cuda_products.defined(tile),
        "sm_90a",
    )
    assert kernel.threads == tile.threads
    assert kernel.shared_bytes >= tile.stages * tile.tokens * 256
    assert kernel.shared_bytes + RESERVED <= SHARED_OF_HOPPER
    assert tile.programs * (kernel.shared_bytes + RESERVED) <= SHARED_OF_HOPPER
    assert tile.programs * tile.threads <= THREADS_OF_HOPPER
    sums = tile.row_tiles * tile.tokens // 2
    assert sums < REGISTERS_OF_HOPPER // (tile.programs * tile.threads)


def test_programs_that_start_early_wait_before_they_read():
    """They are launched so: what the kernel before writes is not there yet."""
    body = SOURCE[SOURCE.index("void product(const Work& work)") :]
    waits, reads = body.index("griddepcontrol.wait"), body.index("work.tile")
    assert waits < body.index("griddepcontrol.launch_dependents") < reads
