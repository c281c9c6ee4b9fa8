"""Tiles of MXFP4 (`tiles` has their order) to the left operand of a product, in registers.

Legend: M rows and K columns of a tile, W its words of codes, S its words of scales; m tile,
w p g h j q c e as in `tiles`.

A thread's word holds just the values that it multiplies, so that on NVIDIA none of them is ever
exchanged. The bits of a pair of values come out of a word by a shift and a mask, as two bf16
numbers 2^-126 times as large; subnormal ones stand for 0.5. A product with 2^126 times the scale
makes the values, exactly: two instructions each. Scales above 2, for which that factor overflows,
and NaN take two products.
"""

from __future__ import annotations

import triton
import triton.language as tl

_PAIRS = """
    .reg .b32 a, b, c, d, t, u;
    and.b32 a, $8, 0x81C081C0;
    shf.l.wrap.b32 t, $8, $8, 12;
    and.b32 b, t, 0x81C081C0;
    shl.b32 t, $8, 6;
    and.b32 c, t, 0x81C081C0;
    shl.b32 t, $8, 2;
    and.b32 t, t, 0x80C080C0;
    shr.u32 u, $8, 6;
    lop3.b32 d, u, 0x01000100, t, 0xEA;
"""
_TO_UNIT = """
    mov.b32 u, 0x7E807E80;
    mul.rn.bf16x2 a, a, u;
    mul.rn.bf16x2 b, b, u;
    mul.rn.bf16x2 c, c, u;
    mul.rn.bf16x2 d, d, u;
"""
_SCALED = """
    mul.rn.bf16x2 a, a, $9;
    mul.rn.bf16x2 b, b, $10;
    mul.rn.bf16x2 c, c, $9;
    mul.rn.bf16x2 d, d, $10;
    mov.b32 {$0, $1}, a;
    mov.b32 {$2, $3}, b;
    mov.b32 {$4, $5}, c;
    mov.b32 {$6, $7}, d;
"""
_FACTOR = """
    prmt.b32 t, $4, 0, 0x4{0}4{0};
    mad.lo.u32 ${0}, t, 128, 0x3F003F00;
"""
_SCALE = """
    prmt.b32 t, $4, 0, 0x4{0}4{0};
    shl.b32 ${0}, t, 7;
    setp.eq.u32 z, t, 0;
    selp.b32 ${0}, 0x00400040, ${0}, z;
    setp.eq.u32 z, t, 0x00FF00FF;
    selp.b32 ${0}, 0x7FC07FC0, ${0}, z;
"""
VALUES: tl.constexpr = tl.constexpr("{" + _PAIRS + _SCALED + "}")
WIDE_VALUES: tl.constexpr = tl.constexpr("{" + _PAIRS + _TO_UNIT + _SCALED + "}")
FACTORS: tl.constexpr = tl.constexpr(
    "{ .reg .b32 t;" + "".join(_FACTOR.format(i) for i in range(4)) + "}"
)
"""Both halves of a register 2^126 times a scale: s + 126 where a bf16 has its exponent."""
SCALES: tl.constexpr = tl.constexpr(
    "{ .reg .b32 t; .reg .pred z;" + "".join(_SCALE.format(i) for i in range(4)) + "}"
)
"""Both halves of a register a scale; 2^-127 is subnormal, and 255 is NaN."""
PATTERN: tl.constexpr = tl.constexpr(0x81C081C0 - (1 << 32))
NO_TOPS: tl.constexpr = tl.constexpr(0x80C080C0 - (1 << 32))


@triton.jit
def weights(words_MW, scales_MS, DTYPE: tl.constexpr, WIDE: tl.constexpr, PTX: tl.constexpr):
    """The values [64 tiles, 128] in `DTYPE`, of words and scales of so many tiles."""
    TILES: tl.constexpr = words_MW.shape[0]
    word = words_MW.reshape(TILES, 2, 4, 8, 4, 2, 2)
    if PTX and tl.bfloat16 == DTYPE:
        s00, s01, s10, s11 = tl.inline_asm_elementwise(
            SCALES if WIDE else FACTORS,
            "=r,=r,=r,=r,r",
            [scales_MS],
            dtype=(tl.int32, tl.int32, tl.int32, tl.int32),
            is_pure=True,
            pack=1,
        )
        v000, v001, v010, v011, v100, v101, v110, v111 = tl.inline_asm_elementwise(
            WIDE_VALUES if WIDE else VALUES,
            "=h,=h,=h,=h,=h,=h,=h,=h,r,r,r",
            [word, _by_word(s00, s10), _by_word(s01, s11)],
            dtype=(tl.bfloat16,) * 8,
            is_pure=True,
            pack=1,
        )
    else:
        upper = _by_word(_scale(scales_MS, 0), _scale(scales_MS, 2))
        lower = _by_word(_scale(scales_MS, 1), _scale(scales_MS, 3))
        turned = (word << 12) | ((word >> 20) & 0xFFF)
        rest = ((word << 2) & NO_TOPS) | ((word >> 6) & 0x01000100)
        v000, v001 = _pair(word & PATTERN, upper, DTYPE)
        v010, v011 = _pair(turned & PATTERN, lower, DTYPE)
        v100, v101 = _pair((word << 6) & PATTERN, upper, DTYPE)
        v110, v111 = _pair(rest, lower, DTYPE)
    left = tl.join(tl.join(v000, v001), tl.join(v010, v011))
    right = tl.join(tl.join(v100, v101), tl.join(v110, v111))
    # m h w g q j (two bits) e p c, to rows m w p g and columns h j c q e.
    value = tl.join(left, right).permute(0, 2, 8, 3, 1, 5, 6, 9, 4, 7)
    return value.reshape(TILES * 64, 128)


@triton.jit
def _by_word(even_MS, odd_MS):
    """A group's factor for each of its words; even and odd groups of a half."""
    TILES: tl.constexpr = even_MS.shape[0]
    group = tl.join(even_MS, odd_MS).reshape(TILES, 4, 8, 2, 2).permute(0, 3, 1, 2, 4)
    group = group.reshape(TILES, 2, 4, 8, 1, 2, 1)
    return tl.broadcast_to(group, TILES, 2, 4, 8, 4, 2, 2)


@triton.jit
def _scale(scales, BYTE: tl.constexpr):
    """2^(s - 127) of that byte, in fp32."""
    byte = (scales >> (8 * BYTE)) & 255
    bits = tl.where(byte == 0, 0x00400000, byte << 23)
    return tl.where(byte == 255, 0x7FC00000, bits).to(tl.float32, bitcast=True)


@triton.jit
def _pair(bits, scale, DTYPE: tl.constexpr):
    """Both values of a pair, by way of fp32."""
    low = (bits << 16).to(tl.float32, bitcast=True) * 8.507059173023462e37
    high = (bits & -65536).to(tl.float32, bitcast=True) * 8.507059173023462e37
    return (low * scale).to(DTYPE), (high * scale).to(DTYPE)
