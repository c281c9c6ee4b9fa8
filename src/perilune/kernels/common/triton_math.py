"""Scalar functions and settings that the Triton kernels share.

On NVIDIA the exponential and the reciprocal are single instructions (`ex2.approx`, `rcp.approx`,
both within 2 units in the last place); Triton's own forms, with their denormal handling, stand
beside them for every other target and for the interpreter.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

LOG2_E: tl.constexpr = tl.constexpr(1.4426950408889634)


def uses_ptx(device: torch.device) -> bool:
    """Whether kernels on `device` may hold NVIDIA instructions."""
    return device.type == "cuda" and torch.version.cuda is not None


def is_hopper(device: torch.device) -> bool:
    """Whether `device` has the products of warp groups, which NVIDIA's later GPUs have no more."""
    return uses_ptx(device) and torch.cuda.get_device_capability(device)[0] == 9


def launches_early(device: torch.device) -> bool:
    """Whether a kernel on `device` may be launched with `launch_pdl`: its programs are then set up
    while the kernel before it ends, and must not touch memory before `gdc_wait`."""
    return uses_ptx(device) and torch.cuda.get_device_capability(device) >= (9, 0)


def dot_precision(dtype: torch.dtype) -> str:
    """Of matrix products of that dtype: fp32 keeps its 24 bits, in three tf32 products."""
    return "tf32x3" if dtype == torch.float32 else "tf32"


@triton.jit
def exp2(x, PTX: tl.constexpr):
    if PTX:
        return tl.inline_asm_elementwise(
            "ex2.approx.ftz.f32 $0, $1;", "=f,f", [x], dtype=tl.float32, is_pure=True, pack=1
        )
    else:
        return tl.exp2(x)


@triton.jit
def reciprocal(x, PTX: tl.constexpr):
    if PTX:
        return tl.inline_asm_elementwise(
            "rcp.approx.ftz.f32 $0, $1;", "=f,f", [x], dtype=tl.float32, is_pure=True, pack=1
        )
    else:
        return 1.0 / x


@triton.jit
def sigmoid(x, PTX: tl.constexpr):
    return reciprocal(1.0 + exp2(x * -LOG2_E, PTX), PTX)
