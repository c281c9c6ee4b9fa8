"""Short causal convolution with SiLU."""

from __future__ import annotations

import torch

from perilune.kernels.common.cases import BF16, EXACT_FP32, normal
from perilune.kernels.common.packing import Packing
from perilune.kernels.registry import Inputs, OpSpec


def _inputs(
    generator: torch.Generator, dtype: torch.dtype, lengths: tuple[int, ...], window: bool
) -> Inputs:
    n, c, w = len(lengths), 6, 4
    return {
        "x_TC": normal(generator, dtype, sum(lengths), c),
        "weight_CW": normal(generator, dtype, c, w),
        "packing": Packing.of(lengths),
        "window_NWC": normal(generator, dtype, n, w - 1, c) if window else None,
    }


def _segmented(generator: torch.Generator, dtype: torch.dtype) -> Inputs:
    inputs = _inputs(generator, dtype, (9, 9), window=False)
    inputs["packing"] = Packing.rows(
        torch.tensor([[0, 0, 1, 2, 2, 2, 2, 2, 3], [0, 0, 0, 0, 0, 1, 1, 1, 1]])
    )
    return inputs


def _decode_inputs(generator: torch.Generator, dtype: torch.dtype) -> Inputs:
    return {
        "x_NC": torch.randn(3, 6, generator=generator, dtype=dtype),
        "weight_CW": torch.randn(6, 4, generator=generator, dtype=dtype),
        "window_NWC": torch.randn(3, 3, 6, generator=generator, dtype=dtype),
    }


CONV = OpSpec(
    name="causal_conv",
    signature="(x_TC, weight_CW, packing, window_NWC) -> (y_TC, window_NWC)",
    reference="perilune.kernels.causal_conv.reference:causal_conv",
    oracle="perilune.kernels.causal_conv.oracle:causal_conv",
    backends={"cuda": "perilune.kernels.causal_conv.triton:causal_conv"},
    cases={
        "one_token": lambda g, d: _inputs(g, d, (1,), window=True),
        "shorter_than_window": lambda g, d: _inputs(g, d, (2, 1, 9), window=True),
        "no_window": lambda g, d: _inputs(g, d, (5, 3), window=False),
        "segmented_rows": _segmented,
    },
    tolerance=EXACT_FP32,
    backend_tolerance={"cuda": EXACT_FP32 | BF16},
    traits="perilune.kernels.causal_conv.traits:CONV",
)
DECODE = OpSpec(
    name="causal_conv_decode",
    signature="(x_NC, weight_CW, window_NWC!) -> y_NC",
    reference="perilune.kernels.causal_conv.reference:causal_conv_decode",
    oracle="perilune.kernels.causal_conv.oracle:causal_conv_decode",
    cases={"three": _decode_inputs},
    tolerance=EXACT_FP32,
    traits="perilune.kernels.causal_conv.traits:DECODE",
)
