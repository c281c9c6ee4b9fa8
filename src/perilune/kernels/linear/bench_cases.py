"""Sizes and least work of the products: weight, tokens and result once."""

from __future__ import annotations

import torch

from perilune.kernels.bench.cases import Bench, Case, Make, Work, drawn, num_bytes
from perilune.kernels.linear.bench_peers import TORCH_FP32
from perilune.kernels.registry import Inputs


def product(tokens: int, width: int, outputs: int, held: torch.dtype = torch.bfloat16) -> Make:
    """The weight is held as bf16 or in another dtype, whatever the tokens are."""

    def make(generator: torch.Generator, dtype: torch.dtype) -> Inputs:
        return {
            "x_TI": drawn(generator, dtype, tokens, width),
            "weight_OI": drawn(generator, torch.float32, outputs, width).to(held),
        }

    return make


def work(inputs: Inputs, backward: bool) -> Work:
    return _work(inputs, backward, inputs["x_TI"].dtype)


def scores_work(inputs: Inputs, backward: bool) -> Work:
    return _work(inputs, backward, torch.float32)


def _work(inputs: Inputs, backward: bool, result: torch.dtype) -> Work:
    x_TI, weight_OI = inputs["x_TI"], inputs["weight_OI"]
    (t, i), o = x_TI.shape, weight_OI.shape[0]
    # Backward: both operands once more, and two products as large as the first.
    times = 3 if backward else 1
    size = num_bytes(x_TI, weight_OI) + t * o * result.itemsize
    return Work(times * size, times * 2 * t * i * o)


_GPU = {"device": "cuda", "dtype": torch.bfloat16}
_SCORES = {**_GPU, "graph": True, "peers": (TORCH_FP32,)}

BENCHES = {
    "linear": Bench(
        inside="the product with a weight of bf16",
        work=work,
        cases={
            "T1_1024x1024_bf16": Case(make=product(1, 1024, 1024)),
            "T32_7168x12288": Case(make=product(32, 7168, 12288), **_GPU),
            "T8192_7168x12288": Case(make=product(8192, 7168, 12288), **_GPU),
        },
    ),
    "scores": Bench(
        inside="fp32 sums of a router's product, tokens and weight as they are stored",
        work=scores_work,
        cases={
            "T1_320x32": Case(make=product(1, 320, 32)),
            **{
                f"T{t}_7168x896": Case(make=product(t, 7168, 896), **_SCORES)
                for t in (1, 32, 128, 1024, 8192)
            },
            **{
                f"T{t}_7168x896_fp32": Case(make=product(t, 7168, 896, torch.float32), **_SCORES)
                for t in (1, 32, 128, 8192)
            },
        },
    ),
}
