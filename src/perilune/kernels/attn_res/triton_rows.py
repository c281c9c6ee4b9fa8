"""What the kernels do with rows of sources: find one, add up its squares, make it fp32 again.

Legend: D model width.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def pick(pointers, strides, n, token):
    """Where the row of a token starts in the n-th tensor."""
    at, stride = pointers[0], strides[0]
    for i in tl.static_range(1, len(pointers)):
        at = tl.where(n == i, pointers[i], at)
        stride = tl.where(n == i, strides[i], stride)
    return at + token * stride


@triton.jit
def _add_pairs(a0, a1, b0, b1):
    return a0 + b0, a1 + b1


@triton.jit
def _add_eights(
    a0, a1, a2, a3, a4, a5, a6, a7, b0, b1, b2, b3, b4, b5, b6, b7
):  # fmt: skip
    return a0 + b0, a1 + b1, a2 + b2, a3 + b3, a4 + b4, a5 + b5, a6 + b6, a7 + b7


@triton.jit
def sums(a_D, b_D, PTX: tl.constexpr):
    """Of both, with one exchange between the warps. An interpreter would add the pairs one by
    one."""
    if PTX:
        return tl.reduce((a_D, b_D), 0, _add_pairs)
    else:
        return tl.sum(a_D, axis=0), tl.sum(b_D, axis=0)


@triton.jit
def wide(v_D, PTX: tl.constexpr):
    """In fp32. A bf16 number is the upper half of one: an instruction each."""
    if PTX and v_D.dtype == tl.bfloat16:
        return tl.inline_asm_elementwise(
            "shl.b32 $0, $2, 16; and.b32 $1, $2, 0xffff0000;",
            "=f,=f,r",
            [v_D],
            dtype=tl.float32,
            is_pure=True,
            pack=2,
        )
    else:
        return v_D.to(tl.float32)


@triton.jit
def wide_again(v_D, after, PTX: tl.constexpr):
    """The same, of which a compiler does not know that, and which it cannot have before it has
    `after`: it would otherwise keep the first ones, in twice the registers."""
    if PTX and v_D.dtype == tl.bfloat16:
        # The third axis of a grid is one program wide, and that is known at the launch only.
        zero = tl.program_id(2) & after.to(tl.int32, bitcast=True)
        return tl.inline_asm_elementwise(
            "prmt.b32 $0, $2, $3, 0x1044; prmt.b32 $1, $2, $3, 0x3244;",
            "=f,=f,r,r,r",
            [v_D, zero],
            dtype=tl.float32,
            is_pure=True,
            pack=2,
        )
    else:
        return v_D.to(tl.float32)


@triton.jit
def moments(values, at: tl.constexpr, count: tl.constexpr, q_D, PTX: tl.constexpr):
    """Squares and products with q of `count` sources from `at` on: four at a time share one
    exchange between the warps."""
    if count == 4 and PTX:
        v0 = wide(values[at], PTX)
        v1 = wide(values[at + 1], PTX)
        v2 = wide(values[at + 2], PTX)
        v3 = wide(values[at + 3], PTX)
        return tl.reduce(
            (v0 * v0, v0 * q_D, v1 * v1, v1 * q_D, v2 * v2, v2 * q_D, v3 * v3, v3 * q_D),
            0,
            _add_eights,
        )
    else:
        found = ()
        for i in tl.static_range(count):
            v_D = wide(values[at + i], PTX)
            found += sums(v_D * v_D, v_D * q_D, PTX)
        return found
