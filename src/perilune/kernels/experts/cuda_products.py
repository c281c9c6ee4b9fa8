"""Launches the experts' products from MXFP4 in CUDA C++ (`cuda_products.cu`), on Hopper.

As `triton_products`, to the last bit, with as many columns as an expert has tokens, in eights,
where Triton's are powers of two.

Legend: P pairs (in the experts' order), L expert input width, I intermediate width; MKW tiles as in
`tiles`.
"""

from __future__ import annotations

import ctypes
from functools import cache
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from perilune.kernels.common import nvrtc
from perilune.kernels.common.cuda_driver import Kernel, launch, load
from perilune.kernels.experts.tiles import ROWS
from perilune.kernels.experts.triton_schedule import Plan, tokens_of_tile

SOURCE = Path(__file__).with_suffix(".cu")
HEADERS = (Path(nvrtc.__file__).with_name("cuda_hopper.cuh"),)
TOKEN_BYTES = 256
"""Of a column tile of 128."""
ALIGNMENT = 16
"""Bytes that are copied at a time."""


class Tile(NamedTuple):
    tokens: int
    """At most, of one expert."""
    least: int
    """Columns of the narrowest product: fewer tokens are padded."""
    threads: int
    row_tiles: int
    """Of 64 weight rows each, of a warp group of 128 threads."""
    programs: int
    """At a time on a multiprocessor: what the registers of a thread have to be enough for."""
    stages: int = 4


FEW = Tile(32, 8, 128, 2, 4)
MANY = Tile(96, 40, 256, 1, 2)


class Work(ctypes.Structure):
    """As the source has it."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("x", "pair", "tile", "w", "y")),
        *((name, ctypes.c_int) for name in ("x_bytes", "active", "width_bytes", "out")),
        *((name, ctypes.c_int) for name in ("column_tiles", "row_tiles")),
        *((name, ctypes.c_float) for name in ("beta", "linear_beta")),
    )


def serves(x_TL: Tensor, wide: bool) -> bool:
    """bf16 rows that can be copied in pieces of 16 bytes, and scales of one product; on Hopper,
    where the compiler is."""
    if wide or x_TL.dtype != torch.bfloat16 or not is_available(x_TL.device):
        return False
    places = x_TL.data_ptr(), x_TL.stride(0) * 2, x_TL.shape[1] * 2
    return all(place % ALIGNMENT == 0 for place in places)


@cache
def is_available(device: torch.device) -> bool:
    return nvrtc.serves(device, "experts pad their tokens")


def tile_for(pairs: int, num_experts: int, dtype: torch.dtype) -> Tile:
    assert dtype == torch.bfloat16
    return FEW if tokens_of_tile(pairs, num_experts) <= FEW.tokens else MANY


def gate_up(
    x_TL: Tensor,
    plan: Plan,
    w13_EMKW: Tensor,
    wide: bool,
    caps: tuple[float | None, float | None],
    tile: Tile,
) -> Tensor:
    """glu(w13 x) of every pair, [P, I]."""
    assert not wide
    pairs, active = plan.place_TR.numel(), plan.place_TR.shape[1]
    hidden_PI = x_TL.new_empty(pairs, w13_EMKW.shape[1] * ROWS // 2)
    _launch("gate_up", x_TL, plan.pair_P, plan.tile_I3, active, w13_EMKW, caps, tile, hidden_PI)
    return hidden_PI


def down(
    hidden_PI: Tensor, tile_I3: Tensor, w2_EMKW: Tensor, wide: bool, width: int, tile: Tile
) -> Tensor:
    """w2 hidden of every pair, fp32 [P, L]."""
    assert not wide
    out_PL = hidden_PI.new_empty(hidden_PI.shape[0], width, dtype=torch.float32)
    _launch("down", hidden_PI, None, tile_I3, 1, w2_EMKW, (None, None), tile, out_PL)
    return out_PL


def _launch(
    name: str,
    x: Tensor,
    pair_P: Tensor | None,
    tile_I3: Tensor,
    active: int,
    w_EMKW: Tensor,
    caps: tuple[float | None, float | None],
    tile: Tile,
    y: Tensor,
) -> None:
    row_tiles, column_tiles = w_EMKW.shape[1:3]
    work = Work(
        x.data_ptr(),
        None if pair_P is None else pair_P.data_ptr(),
        tile_I3.data_ptr(),
        w_EMKW.data_ptr(),
        y.data_ptr(),
        x.stride(0) * 2,
        active,
        x.shape[1] * 2,
        y.shape[1],
        column_tiles,
        row_tiles,
        *(cap or 0.0 for cap in caps),
    )
    of_a_program = tile.threads // 128 * tile.row_tiles
    programs = -(-row_tiles // of_a_program) * tile_I3.shape[0]
    launch(kernel_of(name, tile, x.device), programs, (work,), early=True)


def defined(tile: Tile) -> dict[str, int]:
    """What the source is told."""
    return {
        "MOST": tile.tokens,
        "LEAST": tile.least,
        "THREADS": tile.threads,
        "ROW_TILES": tile.row_tiles,
        "PROGRAMS": tile.programs,
        "STAGES": tile.stages,
    }


@cache
def kernel_of(name: str, tile: Tile, device: torch.device) -> Kernel:
    """Compiled and loaded; a graph cannot be captured before.

    Raises:
        CompileError: NVRTC does not accept the source.
        DriverError: the device does not take the code.
    """
    code = nvrtc.cubin(SOURCE, HEADERS, defined(tile), nvrtc.HOPPER)
    # Boxes of the copies lie at multiples of 1024 bytes.
    shared_bytes = tile.stages * tile.tokens * TOKEN_BYTES + 1024
    with torch.cuda.device(device):
        return load(code, name, tile.threads, shared_bytes)
