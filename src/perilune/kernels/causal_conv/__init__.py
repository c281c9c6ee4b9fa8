"""Short causal convolution with SiLU."""

from __future__ import annotations

import torch

from perilune.kernels.common.cases import BF16, EXACT_FP32, normal
from perilune.kernels.common.packing import Packing
from perilune.kernels.registry import Inputs, OpSpec


def _inputs(
    generator: torch.Generator,
    dtype: torch.dtype,
    lengths: tuple[int, ...],
    window: bool,
    w: int = 4,
) -> Inputs:
    n, c = len(lengths), 6
    return {
        "x_TC": normal(generator, dtype, sum(lengths), c),
        "weight_CW": normal(generator, dtype, c, w),
        "packing": Packing.of(lengths),
        "window_NWC": normal(generator, dtype, n, w - 1, c) if window else None,
    }


def _segmented(
    generator: torch.Generator, dtype: torch.dtype, *documents: tuple[tuple[int, int], ...]
) -> Inputs:
    """A row each, of (number, tokens) of its documents."""
    segment_BL = torch.tensor([[n for n, size in row for _ in range(size)] for row in documents])
    inputs = _inputs(generator, dtype, (segment_BL.shape[1],) * len(documents), window=False)
    inputs["packing"] = Packing.rows(segment_BL)
    return inputs


_SHORT = (((0, 2), (1, 1), (2, 5), (3, 1)), ((0, 5), (1, 4)))
_LONG = (((0, 14), (1, 23), (2, 4)), ((0, 41),))
_NUMBERED_AGAIN = (((0, 3), (1, 1), (0, 1), (1, 2), (0, 2)),)


CONV = OpSpec(
    name="causal_conv",
    signature="(x_TC, weight_CW, packing, window_NWC) -> (y_TC, window_NWC)",
    reference="perilune.kernels.causal_conv.reference:causal_conv",
    oracle="perilune.kernels.causal_conv.oracle:causal_conv",
    backends={"cuda": "perilune.kernels.causal_conv.triton:causal_conv"},
    cases={
        "one_token": lambda g, d: _inputs(g, d, (1,), window=True),
        "shorter_than_window": lambda g, d: _inputs(g, d, (2, 1, 9), window=True),
        "empty_sequence": lambda g, d: _inputs(g, d, (0, 5, 0, 33, 0), window=True),
        "empty_without_window": lambda g, d: _inputs(g, d, (3, 0), window=False),
        "no_window": lambda g, d: _inputs(g, d, (5, 3), window=False),
        "two_taps": lambda g, d: _inputs(g, d, (1, 9), window=True, w=2),
        "five_taps": lambda g, d: _inputs(g, d, (3, 9), window=True, w=5),
        "segmented_rows": lambda g, d: _segmented(g, d, *_SHORT),
        "long_documents": lambda g, d: _segmented(g, d, *_LONG),
        "documents_numbered_again": lambda g, d: _segmented(g, d, *_NUMBERED_AGAIN),
    },
    tolerance=EXACT_FP32,
    backend_tolerance={"cuda": EXACT_FP32 | BF16},
    traits="perilune.kernels.causal_conv.traits:CONV",
)
