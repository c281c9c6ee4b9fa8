"""Linear maps whose fp32 weights are held as fp16 while nothing is lost: half the bytes to read.

Few-token products on a CPU are bound by the weights' bytes. A bf16 or MXFP4 weight has at most
eight significant bits, so fp16 holds it exactly unless it is tiny. Products and sums stay fp32
(FBGEMM through torch.ops.quantized).

Legend: T tokens, I input columns, O output rows.
"""

from __future__ import annotations

import torch
from torch import Tensor

MAX_TOKENS = 8
"""More rows than this are bound by arithmetic; then the fp32 product is faster."""
MAX_ROUNDING = 2.0**-23
"""Of the norm: one fp32 rounding. A bf16 weight loses nothing unless it is below 2^-17."""

_run = torch.ops.quantized.linear_dynamic_fp16


class HalfLinear:
    """y = x W^T for fp32 x [T, I] on the CPU."""

    def __init__(self, weight_OI: Tensor) -> None:
        self._packed = torch.ops.quantized.linear_prepack_fp16(weight_OI.detach().clone(), None)

    def __call__(self, x_TI: Tensor) -> Tensor:
        return _run(x_TI, self._packed)


def half_linear(weight_OI: Tensor) -> HalfLinear | None:
    """A `HalfLinear`, or None where more than `MAX_ROUNDING` would be lost or it cannot run."""
    on_cpu = weight_OI.device.type == "cpu" and weight_OI.dtype == torch.float32
    if not on_cpu or "fbgemm" not in torch.backends.quantized.supported_engines:
        return None
    lost = (weight_OI.half().float() - weight_OI).norm()
    return HalfLinear(weight_OI) if bool(lost <= MAX_ROUNDING * weight_OI.norm()) else None
