"""MXFP4: 4-bit weights with one power-of-two scale for 32 input columns.

A byte holds two E2M1 codes, the even column in the low nibble. A scale byte s means 2^(s - 127).
The value is code value times scale; there is no global scale. Source: OCP Microscaling Formats
1.0, and the layout of the released checkpoint.

Quantising follows the OCP rule: the scale's exponent is floor(log2(largest magnitude)) - 2, the
values round to nearest (ties to the even code) and saturate at 6. How Kimi K3's own files were
rounded is not published. A value that is on the grid already comes back unchanged.

Legend: E stacked matrices (any leading shape), O output rows, I input columns, G = I/32 groups.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from perilune.core.errors import CheckpointError
from perilune.kernels.common.mxfp4 import CODE_VALUES, GROUP, NAN_SCALE, SCALE_BIAS

LARGEST = CODE_VALUES[-1]


class Packed(NamedTuple):
    weight_packed: Tensor
    """uint8 [..., O, I/2]."""
    weight_scale: Tensor
    """uint8 [..., O, I/32]."""


def unpack(packed: Packed, dtype: torch.dtype = torch.float32) -> Tensor:
    """The weights [..., O, I], computed in fp32 and cast to `dtype`.

    Exact in fp32, except that the two largest scales overflow to infinity where a product does.

    Raises:
        CheckpointError: a scale byte is 255 (NaN), which no quantiser writes.
    """
    require_numbers(packed)
    codes, scale_OG = packed
    table = torch.tensor([*CODE_VALUES, *(-v for v in CODE_VALUES)], device=codes.device)
    nibbles = torch.stack([codes & 15, codes >> 4], dim=-1)
    grouped = table[nibbles.int()].view(*scale_OG.shape, GROUP)
    values = grouped * _power_of_two(scale_OG)[..., None]
    return values.view(*codes.shape[:-1], -1).to(dtype)


def require_numbers(packed: Packed) -> None:
    """
    Raises:
        CheckpointError: a scale byte is 255 (NaN), which no quantiser writes.
    """
    if bool((packed.weight_scale == NAN_SCALE).any()):
        raise CheckpointError("an MXFP4 scale byte is 255 (not a number): the tensor is corrupt")


def pack(weight_OI: Tensor) -> Packed:
    """Quantises weights [..., O, I] of any float dtype.

    Raises:
        ValueError: I is not a multiple of 32, or a weight is not finite.
    """
    if not bool(weight_OI.isfinite().all()):
        raise ValueError("weights with infinities or NaN cannot be packed as MXFP4")
    units, scale_byte = _to_grid(weight_OI)
    magnitude = units.abs()
    boundaries = torch.tensor(CODE_VALUES, device=units.device)
    code = torch.searchsorted(boundaries, magnitude) | (torch.signbit(units).int() << 3)
    code = code.to(torch.uint8).view(*weight_OI.shape[:-1], -1, 2)
    return Packed(code[..., 0] | (code[..., 1] << 4), scale_byte.to(torch.uint8))


def fake_quantize(weight_OI: Tensor) -> Tensor:
    """`unpack(pack(weight))` bit for bit, elementwise on any device, in the dtype of `weight_OI`.

    The gradient passes straight through, for quantisation-aware training.
    """
    return _StraightThrough.apply(weight_OI)


class _StraightThrough(torch.autograd.Function):
    @staticmethod
    def forward(ctx: object, weight_OI: Tensor) -> Tensor:
        units, scale_byte = _to_grid(weight_OI)
        values = units * _power_of_two(scale_byte)[..., None]
        return values.view(weight_OI.shape).to(weight_OI.dtype)

    @staticmethod
    def backward(ctx: object, *grads: Tensor) -> Tensor:
        return grads[0]


def _to_grid(weight_OI: Tensor) -> tuple[Tensor, Tensor]:
    """Rounded multiples of the scale, fp32 [..., G, 32], and scale bytes, int32 [..., G]."""
    columns = weight_OI.shape[-1]
    if columns % GROUP:
        raise ValueError(f"MXFP4 needs input columns in multiples of {GROUP}, not {columns}")
    x = weight_OI.float().reshape(*weight_OI.shape[:-1], columns // GROUP, GROUP)
    # The exponent field of the largest magnitude is floor(log2) + 127, in integers and so exact;
    # a subnormal one has field 0, and its scale is the smallest.
    exponent = x.abs().amax(dim=-1).view(torch.int32) >> 23
    byte = (exponent - 2).clamp(0, NAN_SCALE - 1)
    # Multiplying by the inverse scale: it is never subnormal here, so flushing cannot hurt.
    y = x * _power_of_two(2 * SCALE_BIAS - byte)[..., None]
    magnitude = y.abs()
    step = torch.where(magnitude < 2, 0.5, torch.where(magnitude < 4, 1.0, 2.0))
    return (torch.round(y / step) * step).clamp(-LARGEST, LARGEST), byte


def _power_of_two(byte: Tensor) -> Tensor:
    """2^(byte - 127) as fp32, built from bits; byte 0 is the subnormal 2^-127."""
    bits = byte.to(torch.int32) << 23
    return torch.where(bits == 0, 0x00400000, bits).view(torch.float32)
