"""MXFP4 matrices in the order in which a product's registers want them.

A tile has 64 rows of 128 columns. Its 1024 words of 32 bits hold eight codes each: rows g and g + 8
of a slab of 16, columns 2q, 2q + 1, 2q + 8 and 2q + 9 of a run of 16. That is what one thread holds
of the left operand of a product on NVIDIA's tensor cores, so that a word never changes threads. A
code's bits lie where a shift and a mask make a bf16 of them. 64 words of scales follow, four of
them each: of rows g and g + 8, in two groups of 32 columns.

Rows and columns are padded with zeros. For a gated product the gate's and the up's rows alternate
in runs of 8, so that a thread holds both of a channel.

Legend: E stacked matrices, O output rows, I input columns, G = I/32 groups, M row tiles, K column
tiles. Of a tile: w slab of 16 rows, p half of a slab, g row of 8, h half of the columns, j run of
16 columns of a half, c half of a run, q pair of a half, e column of a pair.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from perilune.kernels.common.mxfp4 import CODE_VALUES, GROUP, NAN_SCALE, SCALE_BIAS

ROWS, COLUMNS = 64, 128
WORDS = ROWS * COLUMNS // 8
SCALE_WORDS = ROWS * COLUMNS // GROUP // 4
PAD_ROWS = 2 * ROWS
"""Row tiles come in pairs."""
ALTERNATE = 8
"""Rows of the gate, then as many of the up."""
TOP_SCALE = 128
"""Up to this byte, a scale of 2, one product makes a value; see `triton_decode`."""
PAIR, TOPS, SIGNS_AND_LOWS, WORD_BITS = 0x81C081C0, 0x01000100, 0x80C080C0, 0xFFFFFFFF


class Packed(NamedTuple):
    codes_EOI: Tensor
    """uint8 [E, O, I/2]: two E2M1 codes a byte, the even column in the low nibble."""
    scale_EOG: Tensor
    """uint8 [E, O, I/32]: s means 2^(s - 127), and 255 NaN."""


def tiled(packed: Packed, *, gated: bool) -> Tensor:
    """int32 [E, M, K, 1088]: the codes' and the scales' words of each tile."""
    codes_EOI = torch.stack([packed.codes_EOI & 15, packed.codes_EOI >> 4], -1).flatten(-2)
    codes_EOI = _padded(_alternate(codes_EOI) if gated else codes_EOI, COLUMNS)
    scale_EOG = packed.scale_EOG
    scale_EOG = _padded(_alternate(scale_EOG) if gated else scale_EOG, COLUMNS // GROUP)
    words = _word(_by_word(codes_EOI).long())
    scales = _by_scale_word(scale_EOG).int()
    scale_words = scales[..., 0] | scales[..., 1] << 8 | scales[..., 2] << 16 | scales[..., 3] << 24
    return torch.cat([words.int().flatten(3), scale_words.flatten(3)], -1)


def untiled(tiles_EMKW: Tensor, rows: int, columns: int, *, gated: bool) -> Packed:
    """The inverse of `tiled`, for matrices of that size."""
    e, m, k, _ = tiles_EMKW.shape
    words = tiles_EMKW[..., :WORDS].reshape(e, m, k, 2, 4, 8, 4, 4)
    by_word = _codes(words.long())
    codes = by_word.permute(0, 1, 4, 9, 5, 2, 3, 7, 8, 6, 10)
    codes_EOI = codes.reshape(e, m * ROWS, k * COLUMNS)
    scale_words = tiles_EMKW[..., WORDS:].reshape(e, m, k, 4, 8, 2)
    scales = torch.stack([(scale_words >> (8 * i)) & 255 for i in range(4)], -1)
    scales = scales.unflatten(-1, (2, 2)).permute(0, 1, 3, 7, 4, 2, 5, 6)
    scale_EOG = scales.reshape(e, m * ROWS, k * COLUMNS // GROUP)
    if gated:
        codes_EOI, scale_EOG = (_apart(x, rows // 2) for x in (codes_EOI, scale_EOG))
    codes_EOI = codes_EOI[:, :rows, :columns].to(torch.uint8)
    scale_EOG = scale_EOG[:, :rows, : columns // GROUP].to(torch.uint8)
    return Packed(codes_EOI[..., ::2] | (codes_EOI[..., 1::2] << 4), scale_EOG)


def is_wide(packed: Packed) -> bool:
    """Whether a scale is beyond what one product serves. Asks the device: for load time."""
    return bool((packed.scale_EOG > TOP_SCALE).any())


def values(packed: Packed, dtype: torch.dtype) -> Tensor:
    """The matrices [E, O, I]; a scale of 255 makes NaN."""
    codes_EOI, scale_EOG = packed
    magnitudes = torch.tensor(CODE_VALUES, dtype=dtype, device=codes_EOI.device)
    nibbles = torch.stack([codes_EOI & 15, codes_EOI >> 4], -1).flatten(-2).int()
    table = torch.cat([magnitudes, -magnitudes])
    scales = torch.exp2(scale_EOG.double() - SCALE_BIAS)
    scales = scales.where(scale_EOG != NAN_SCALE, torch.nan).to(dtype)
    return table[nibbles] * scales.repeat_interleave(GROUP, -1)


def _padded(x_EOI: Tensor, columns: int) -> Tensor:
    rows, width = x_EOI.shape[1:]
    return torch.nn.functional.pad(x_EOI, (0, -width % columns, 0, -rows % PAD_ROWS))


def _alternate(x_EOI: Tensor) -> Tensor:
    """Runs of gate rows and of up rows in turn, each half padded to whole runs."""
    e, rows, width = x_EOI.shape
    halves = x_EOI.view(e, 2, rows // 2, width)
    halves = torch.nn.functional.pad(halves, (0, 0, 0, -(rows // 2) % ALTERNATE))
    return halves.unflatten(2, (-1, ALTERNATE)).transpose(1, 2).reshape(e, -1, width)


def _apart(x_EOI: Tensor, inner: int) -> Tensor:
    """The inverse of `_alternate`."""
    e, _, width = x_EOI.shape
    halves = x_EOI.view(e, -1, 2, ALTERNATE, width).transpose(1, 2).reshape(e, 2, -1, width)
    return halves[:, :, :inner].reshape(e, 2 * inner, width)


def _by_word(codes_EOI: Tensor) -> Tensor:
    """[E, M, K, h, w, g, q, j, c, p, e]."""
    e, rows, columns = codes_EOI.shape
    tiles = codes_EOI.view(e, rows // ROWS, 4, 2, 8, columns // COLUMNS, 2, 4, 2, 4, 2)
    return tiles.permute(0, 1, 5, 6, 2, 4, 9, 7, 8, 3, 10)


def _by_scale_word(scale_EOG: Tensor) -> Tensor:
    """[E, M, K, w, g, h, 4]: rows g and g + 8 of a group, then of the next one."""
    e, rows, groups = scale_EOG.shape
    tiles = scale_EOG.view(e, rows // ROWS, 4, 2, 8, groups // 4, 2, 2)
    return tiles.permute(0, 1, 5, 2, 4, 6, 7, 3).flatten(-2)


def _word(code_cpe: Tensor) -> Tensor:
    """Of eight codes [..., c, p, e]: a pair, in either half of a word sign and magnitude where bf16
    has its sign and the ends of exponent and mantissa, goes where `_pairs` looks for it."""
    half = (code_cpe >> 3 << 15) | ((code_cpe & 7) << 6)
    pair = half[..., 0] | half[..., 1] << 16
    upper_left, lower_left = pair[..., 0, 0], pair[..., 0, 1]
    upper_right, lower_right = pair[..., 1, 0], pair[..., 1, 1]
    word = upper_left | lower_left >> 12 | (lower_left << 20 & WORD_BITS) | upper_right >> 6
    return word | (lower_right & SIGNS_AND_LOWS) >> 2 | (lower_right & TOPS) << 6


def _pairs(word: Tensor) -> Tensor:
    """The four pairs [..., c, p] of a word: two instructions each where a shift turns in a circle,
    but for the last, whose bits are what the others leave."""
    word = word & WORD_BITS
    lower_left = word << 12 | word >> 20
    lower_right = (word << 2 & SIGNS_AND_LOWS) | (word >> 6 & TOPS)
    pairs = [word & PAIR, lower_left & PAIR, word << 6 & PAIR, lower_right]
    return torch.stack(pairs, -1).unflatten(-1, (2, 2))


def _codes(word: Tensor) -> Tensor:
    """[..., c, p, e]."""
    pair = _pairs(word)
    half = torch.stack([pair & 0xFFFF, pair >> 16], -1)
    return (half >> 12 & 8) | (half >> 6 & 7)
