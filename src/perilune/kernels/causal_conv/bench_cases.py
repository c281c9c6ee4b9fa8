"""Sizes and least work of the short convolution: each token in and out once, windows in and out."""

from __future__ import annotations

import torch

from perilune.kernels.bench.cases import Bench, Case, Make, Work, drawn, num_bytes
from perilune.kernels.causal_conv.bench_peers import FLA
from perilune.kernels.common.packing import Packing
from perilune.kernels.registry import Inputs

TAPS = 4
CHANNELS = 3 * 96 * 128
"""Queries, keys and values of K3 together."""


def packed(lengths: tuple[int, ...], channels: int) -> Make:
    def make(generator: torch.Generator, dtype: torch.dtype) -> Inputs:
        return {
            "x_TC": drawn(generator, dtype, sum(lengths), channels),
            "weight_CW": drawn(generator, torch.float32, channels, TAPS, scale=0.5),
            "packing": Packing.of(lengths),
            "window_NWC": drawn(generator, torch.float32, len(lengths), TAPS - 1, channels),
        }

    return make


def work(inputs: Inputs, backward: bool) -> Work:
    """Forward: x, y, windows. Backward: x and dy again, dx, and the windows once more."""
    x = inputs["x_TC"]
    forward = 2 * num_bytes(x) + 2 * num_bytes(inputs["window_NWC"])
    flops = 2 * TAPS * x.numel()
    if not backward:
        return Work(forward, flops)
    return Work(2 * forward + num_bytes(x), 3 * flops)


_BESIDE = {"device": "cuda", "dtype": torch.bfloat16, "peers": (FLA,)}

BENCHES = {
    "causal_conv": Bench(
        inside="convolution, SiLU, windows in and out",
        work=work,
        cases={
            "T256_C1024": Case(make=packed((256,), 1024)),
            "T128_C1024_backward": Case(make=packed((128,), 1024), backward=True),
            "T8192_C36864": Case(make=packed((8192,), CHANNELS), **_BESIDE),
            "8x1024_C36864": Case(make=packed((1024,) * 8, CHANNELS), **_BESIDE),
            "T8192_C36864_backward": Case(make=packed((8192,), CHANNELS), backward=True, **_BESIDE),
        },
    ),
}
