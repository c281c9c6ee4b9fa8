"""What this device can do at best, measured in the same run."""

from __future__ import annotations

from typing import NamedTuple

import torch

from perilune.kernels.bench.inputs import cache_bytes
from perilune.kernels.bench.stopwatch import Stopwatch

REPEATS = 20
MATMUL_SIZE = {"cuda": 8192, "cpu": 768}
MATMUL_DTYPE = {"cuda": torch.bfloat16, "cpu": torch.float32}
COPY_BYTES = {"cuda": 2 << 30}


class Ceilings(NamedTuple):
    bytes_per_s: float
    """A copy in device memory, read and write counted."""
    flops_per_s: float
    """A large matrix product: bf16 on a GPU, fp32 on a CPU."""


def measure_ceilings(device: torch.device, stopwatch: Stopwatch) -> Ceilings:
    """Of many repetitions the fastest tenth: a ceiling that is passed by luck is none."""
    half = COPY_BYTES.get(device.type, 2 * cache_bytes(device)) // 2
    source = torch.ones(half // 4, dtype=torch.float32, device=device)
    target = torch.empty_like(source)
    size = MATMUL_SIZE[device.type]
    left = torch.randn(size, size, device=device).to(MATMUL_DTYPE[device.type])
    right = torch.randn(size, size, device=device).to(left.dtype)
    product = torch.empty_like(left)
    copy_s = _fast(stopwatch, lambda: target.copy_(source))
    matmul_s = _fast(stopwatch, lambda: torch.mm(left, right, out=product))
    return Ceilings(2 * source.numel() * 4 / copy_s, 2 * size**3 / matmul_s)


def _fast(stopwatch: Stopwatch, run: object) -> float:
    assert callable(run)
    for _ in range(3):
        run()
    times = sorted(stopwatch.time(run).seconds for _ in range(REPEATS))
    return times[REPEATS // 10]
