"""The NVIDIA instructions that decode MXFP4, read one by one: the interpreter skips them."""

from __future__ import annotations

import re

import pytest
import torch

from perilune.kernels.experts import triton_decode
from perilune.kernels.experts.tiles import Packed, is_wide, tiled, values

WORD = 0xFFFFFFFF


def halves(bits: int) -> torch.Tensor:
    """The two bf16 of a register, the lower one first."""
    both = torch.tensor([bits & 0xFFFF, bits >> 16], dtype=torch.int32)
    return both.to(torch.uint16).view(torch.bfloat16)


def times(a: int, b: int) -> int:
    product = (halves(a).double() * halves(b).double()).bfloat16()
    low, high = product.view(torch.uint16).tolist()
    return low | high << 16


def lop3(a: int, b: int, c: int, table: int) -> int:
    chosen = 0
    for bit in range(32):
        row = (a >> bit & 1) << 2 | (b >> bit & 1) << 1 | (c >> bit & 1)
        chosen |= (table >> row & 1) << bit
    return chosen


def prmt(a: int, b: int, selector: int) -> int:
    source = a | b << 32
    picked = [selector >> (4 * i) & 15 for i in range(4)]
    assert all(nibble < 8 for nibble in picked)  # else it would spread a sign
    return sum((source >> (8 * nibble) & 255) << (8 * i) for i, nibble in enumerate(picked))


DO = {
    "and.b32": lambda a, b: a & b,
    "shl.b32": lambda a, n: a << n & WORD,
    "shf.l.wrap.b32": lambda low, high, n: (high << n | low >> (32 - n)) & WORD,
    "shr.u32": lambda a, n: a >> n,
    "lop3.b32": lop3,
    "prmt.b32": prmt,
    "mad.lo.u32": lambda a, b, c: a * b + c & WORD,
    "mul.rn.bf16x2": times,
    "setp.eq.u32": lambda a, b: a == b,
    "selp.b32": lambda a, b, p: a if p else b,
}


def executed(text: str, **registers: int) -> dict[str, int]:
    """Registers by name after `text`, whose halves unpacked are `name.0` and `name.1`."""
    at: dict[str, int] = dict(registers)

    def read(name: str) -> int:
        return at[name] if name in at else int(name.removesuffix("U"), 0)

    for line in re.findall(r"([^;{}\n]+(?:\{[^}]*\}[^;]*)?);", text):
        op, _, rest = line.strip().partition(" ")
        if op.startswith(".reg"):
            continue
        if op == "mov.b32" and rest.startswith("{"):
            low, high, source = re.findall(r"[$\w]+", rest)
            at[low], at[high] = read(source) & 0xFFFF, read(source) >> 16
            continue
        target, *sources = (x.strip() for x in rest.split(","))
        operands = [read(x) for x in sources]
        at[target] = operands[0] if op == "mov.b32" else DO[op](*operands)
    return at


def factors(scale_word: int, wide: bool) -> list[int]:
    text = triton_decode.SCALES if wide else triton_decode.FACTORS
    at = executed(text.value, **{"$4": scale_word})
    return [at[f"${i}"] for i in range(4)]


def decoded(word: int, upper: int, lower: int, wide: bool) -> torch.Tensor:
    text = triton_decode.WIDE_VALUES if wide else triton_decode.VALUES
    at = executed(text.value, **{"$8": word, "$9": upper, "$10": lower})
    bits = torch.tensor([at[f"${i}"] for i in range(8)], dtype=torch.int32)
    return bits.to(torch.uint16).view(torch.bfloat16)


@pytest.mark.parametrize(
    "scales", [(0, 1, 2, 3), (117, 118, 119, 128), (126, 127, 128, 129), (200, 252, 0, 255)]
)
def test_they_make_the_values_of_a_word(scales):
    every_code(scales)


def every_code(scales):
    for first in range(16):
        two_words(scales, first)


def two_words(scales, first):
    """Of the first thread: rows 0 and 8, columns 0, 1, 8, 9 of a group, and of the next one."""
    codes = (torch.arange(64 * 128).view(64, 128) * 7 + torch.arange(64)[:, None] + first) % 16
    scale = torch.zeros(64, 4, dtype=torch.uint8)
    scale[0, :2] = torch.tensor(scales[::2])
    scale[8, :2] = torch.tensor(scales[1::2])
    codes = codes.to(torch.uint8)
    plain = Packed((codes[:, ::2] | codes[:, 1::2] << 4)[None], scale[None])
    words = tiled(plain, gated=False)[0, 0, 0].tolist()
    want = values(plain, torch.bfloat16)[0]
    wide = is_wide(plain)
    s00, s01, s10, s11 = factors(words[1024] & WORD, wide)
    for word, (upper, lower) in ((0, (s00, s01)), (2, (s10, s11))):
        got = decoded(words[word] & WORD, upper, lower, wide)
        column = 16 * word
        order = [(0, 0), (0, 1), (8, 0), (8, 1), (0, 8), (0, 9), (8, 8), (8, 9)]
        expected = torch.stack([want[row, column + c] for row, c in order])
        assert torch.equal(got.isnan(), expected.isnan())
        assert torch.equal(got.nan_to_num(), expected.nan_to_num())


@pytest.mark.parametrize(
    ("right", "wrong"), [("0x01000100", "0x00000100"), ("t, $8, 6;", "t, $8, 5;"), ("0xEA", "0xA8")]
)
def test_a_wrong_instruction_is_seen(right, wrong, monkeypatch):
    faulty = triton_decode.VALUES.value.replace(right, wrong)
    assert faulty != triton_decode.VALUES.value
    monkeypatch.setattr(triton_decode, "VALUES", type(triton_decode.VALUES)(faulty))
    with pytest.raises(AssertionError):
        every_code((117, 118, 119, 128))
