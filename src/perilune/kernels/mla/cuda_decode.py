"""Launches programs of MLA decode in CUDA C++ (`cuda_decode.cu`): 96 heads without padding.

Legend: N sequences, Q query tokens of each, H heads, C latent width.
"""

from __future__ import annotations

from ctypes import c_float, c_int, c_void_p
from functools import cache
from pathlib import Path

import torch
from torch import Tensor

from perilune.kernels.common import nvrtc
from perilune.kernels.common.cuda_driver import Kernel, load, rows_in_boxes
from perilune.kernels.common.cuda_driver import launch as launch_kernel
from perilune.kernels.common.triton_math import LOG2_E
from perilune.kernels.mla.triton_decode_plan import Parts, Plan
from perilune.kernels.mla.triton_decode_rows import BOX, BOXED_CHANNELS, Rows

SOURCE = Path(__file__).with_suffix(".cu")
HEADERS = (Path(nvrtc.__file__).with_name("cuda_hopper.cuh"),)
QUERY_ROWS = 96
"""Of a tile: K3's heads, of one query token."""
TOKENS = 64
THREADS = 256
"""Two warp groups."""
SHARED_BYTES = 227 * 1024
"""All that a program may have: there is one on a multiprocessor at a time. That what the source
lays out fits is asserted there."""


def serves(q_NQHC: Tensor, rows: Rows) -> bool:
    """K3's bf16 rows in boxes, whole tiles of heads, on Hopper, where the compiler is."""
    if not is_available(q_NQHC.device):
        return False
    aligned = q_NQHC.data_ptr() % 16 == 0
    in_tiles = q_NQHC.dtype == torch.bfloat16 and q_NQHC.shape[2] % QUERY_ROWS == 0
    return in_tiles and aligned and rows.come_in_boxes


@cache
def is_available(device: torch.device) -> bool:
    return nvrtc.serves(device, "decoding pads 96 heads to 128")


def plan_of(rows: int, programs: int) -> Plan:
    """For so many query rows of a sequence, a multiple of `QUERY_ROWS`, and programs at a time."""
    return Plan(rows, QUERY_ROWS, max(1, programs // (rows // QUERY_ROWS)), TOKENS, False)


def launch(q_NQHC: Tensor, rows: Rows, parts: Parts, scale: float, plan: Plan) -> None:
    """As `triton_decode_plain.launch`, for what `serves` says yes to."""
    q_NQHC = q_NQHC.contiguous()
    (n, q, h, width), pool_PSC = q_NQHC.shape, rows.c_PSC
    num_rows, row_bytes = pool_PSC.shape[0] * pool_PSC.shape[1], pool_PSC.stride(1) * 2
    query_box, row_box = (QUERY_ROWS, BOX), (TOKENS, BOX)
    pointers = (rows.table_NW, rows.length_N, *parts)
    numbers = (n, rows.capacity, plan.teams, q * h, pool_PSC.shape[1])
    numbers += (rows.table_NW.stride(0), rows.page, q, h)
    arguments = (
        rows_in_boxes(q_NQHC.data_ptr(), n * q * h, width, width * 2, query_box),
        rows_in_boxes(pool_PSC.data_ptr(), num_rows, sum(BOXED_CHANNELS), row_bytes, row_box),
        *(c_void_p(x.data_ptr()) for x in pointers),
        *map(c_int, numbers),
        c_float(scale * LOG2_E.value),
    )
    launch_kernel(kernel_of(q_NQHC.device), plan.programs, arguments)


def defined() -> dict[str, int]:
    """What the source is told."""
    return {
        "QUERY_ROWS": QUERY_ROWS,
        "TOKENS": TOKENS,
        "THREADS": THREADS,
        "SHARED_BYTES": SHARED_BYTES,
    }


@cache
def kernel_of(device: torch.device) -> Kernel:
    """Compiled and loaded; a graph cannot be captured before.

    Raises:
        CompileError: NVRTC does not accept the source.
        DriverError: the device does not take the code.
    """
    code = nvrtc.cubin(SOURCE, HEADERS, defined(), nvrtc.HOPPER)
    with torch.cuda.device(device):
        return load(code, "attend", THREADS, SHARED_BYTES)
