"""Loops compiled for this CPU (numba), and the scalar functions that they share.

With few tokens a step is bound by the number of tensor operations, not by their arithmetic: one
compiled loop takes the place of ten of them. The functions have no branches, so that LLVM turns
loops around them into vector instructions.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from llvmlite import ir
from numba import extending, njit, types

from perilune.kernels.common.jit_cache import keep

_LOG2_E = np.float32(1.4426950408889634)
_LN2_HIGH = np.float32(0.693359375)
"""ln 2 in two parts: times a small integer, the first is exact (Cody and Waite, 1980)."""
_LN2_LOW = np.float32(0.6931471805599453 - 0.693359375)
intrinsic: Any = extending.intrinsic


def jit(function: Callable[..., Any]) -> Any:
    """Compiles on the first call and keeps the result on disk; the GIL is released inside.

    Sums may be reordered, which vectors need; NaN and infinity keep their meaning.
    """
    flags = {"reassoc", "contract", "nsz"}
    return keep(njit(function, fastmath=flags, nogil=True, error_model="numpy"))


@intrinsic
def bf16_to_fp32(typing_context: Any, bits: Any) -> Any:
    """The value of a bf16 number that is held as uint16: its bits are the upper half of fp32's."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        wide = builder.zext(args[0], ir.IntType(32))
        high = builder.shl(wide, ir.Constant(ir.IntType(32), 16))
        return builder.bitcast(high, ir.FloatType())

    return types.float32(types.uint16), generate


@intrinsic
def _fp32_of_bits(typing_context: Any, bits: Any) -> Any:
    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return builder.bitcast(args[0], ir.FloatType())

    return types.float32(types.int32), generate


@jit
def _split(x: Any) -> tuple[Any, Any]:
    """(e^r - 1, 2^n) with x = n ln 2 + r and |r| <= ln 2 / 2; fp32, Taylor to r^7."""
    n = np.floor(x * _LOG2_E + np.float32(0.5))
    r = x - n * _LN2_HIGH - n * _LN2_LOW
    p = np.float32(1 / 5040)
    p = p * r + np.float32(1 / 720)
    p = p * r + np.float32(1 / 120)
    p = p * r + np.float32(1 / 24)
    p = p * r + np.float32(1 / 6)
    p = p * r + np.float32(0.5)
    p = p * r + np.float32(1)
    return p * r, _fp32_of_bits((np.int32(n) + np.int32(127)) << np.int32(23))


@jit
def exp(x: Any) -> Any:
    """e^x in fp32 within 3 units in the last place; beyond +-87 it stays near that end."""
    x = np.float32(-87) if x < np.float32(-87) else x
    x = np.float32(87) if x > np.float32(87) else x
    below, power = _split(x)
    return power * below + power


@jit
def sigmoid(x: Any) -> Any:
    return np.float32(1) / (np.float32(1) + exp(-x))


@jit
def tanh(x: Any) -> Any:
    """E / (E + 2) with E = e^2x - 1, which keeps its relative precision near zero."""
    x = np.float32(-20) if x < np.float32(-20) else x
    x = np.float32(20) if x > np.float32(20) else x
    below, power = _split(np.float32(2) * x)
    e = power * below + (power - np.float32(1))
    return e / (e + np.float32(2))
