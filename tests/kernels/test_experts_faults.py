"""Faults planted in a copy of the experts' Triton kernels: each moves a result out of its bound."""

from __future__ import annotations

from functools import cache
from types import ModuleType
from typing import NamedTuple

import pytest
import torch
from triton_faults import plant_in_source

from perilune.kernels.common.cases import FP32
from perilune.kernels.experts import (
    mxfp4_oracle,
    oracle,
    packed,
    triton,
    triton_combine,
    triton_decode,
    triton_mxfp4,
    triton_plain,
    triton_products,
    triton_schedule,
)
from perilune.kernels.experts.tiles import tiled
from perilune.kernels.testing.compare import compare
from perilune.kernels.testing.run import as_double, run

# The interpreter is numpy, which warns of what a fault makes overflow.
pytestmark = pytest.mark.filterwarnings("ignore:.*encountered in:RuntimeWarning")

DECODE, PRODUCTS, PLAIN = triton_decode, triton_products, triton_plain
SCHEDULE, COMBINE = triton_schedule, triton_combine
USERS = (triton, triton_mxfp4, DECODE, PRODUCTS, PLAIN, SCHEDULE, COMBINE)
IN_TWO = triton_products.Tile(32, 1, 4, 1, more=16)
# The last tile's columns, and each expert's last tile of tokens, are not full.
TOKENS, EXPERTS, WIDTH, INNER = 17, 2, 160, 40


class Fault(NamedTuple):
    module: ModuleType
    right: str
    wrong: str
    case: str = "mxfp4"


FAULTS = {
    "scales of neighbouring groups swapped": Fault(
        DECODE,
        "_by_word(_scale(scales_MS, 0), _scale(scales_MS, 2))",
        "_by_word(_scale(scales_MS, 2), _scale(scales_MS, 0))",
    ),
    "rows of a slab share scales": Fault(DECODE, "_scale(scales_MS, 1)", "_scale(scales_MS, 0)"),
    "a pair without signs": Fault(DECODE, "((word << 2) & NO_TOPS)", "((word << 2) & 0x00C000C0)"),
    "a pair without its third bit": Fault(DECODE, " | ((word >> 6) & 0x01000100)", ""),
    "runs of columns out of order": Fault(
        DECODE, "permute(0, 2, 8, 3, 1, 5, 6, 9, 4, 7)", "permute(0, 2, 8, 3, 1, 6, 5, 9, 4, 7)"
    ),
    "halves of a run swapped": Fault(DECODE, "tl.join(left, right)", "tl.join(right, left)"),
    "pairs read as tokens": Fault(PRODUCTS, "pair_N // ACTIVE", "pair_N % ACTIVE"),
    "gate for up": Fault(PRODUCTS, "gate, up = tl.split", "up, gate = tl.split"),
    "up uncapped": Fault(PRODUCTS, "capped(up, linear_beta,", "capped(up, None,"),
    "the first expert's weights": Fault(
        PRODUCTS, "expert.to(tl.int64) * PROGRAMS", "expert.to(tl.int64) * 0"
    ),
    "the last columns lost": Fault(
        PRODUCTS, "tl.range(0, COLUMN_TILES,", "tl.range(0, (COLUMN_TILES + 1) // 2,"
    ),
    "one token for all of the second product": Fault(
        PRODUCTS, "row_O[:, None] * x_stride", "0 * row_O[:, None]", "mxfp4 in two"
    ),
    "the first places again": Fault(PRODUCTS, "+ FIRST +", "+ 0 * FIRST +", "mxfp4 in two"),
    "the last columns for the second product": Fault(
        PRODUCTS,
        "_columns(more_at, here_O, k,",
        "_columns(more_at, here_O, COLUMN_TILES - 1 - k,",
        "mxfp4 in two",
    ),
    "the second product without weights": Fault(
        PRODUCTS, "acc_MO = tl.dot(w_MK", "acc_MO = tl.dot(0 * w_MK", "mxfp4 in two"
    ),
    "a second tile that is the first": Fault(SCHEDULE, "+ tile_I * TOKENS", "+ 0 * tile_I"),
    "the next expert's tokens": Fault(
        SCHEDULE,
        "tl.store(tile_p + i_ * 3, tl.where(used_I, expert_I, -1)",
        "tl.store(tile_p + i_ * 3, tl.where(used_I, E - 1 - expert_I, -1)",
    ),
    "unweighted": Fault(COMBINE, "weight * out_L", "out_L"),
    "the first choice again": Fault(COMBINE, "place_p + t * R + r", "place_p + t * R"),
    "gate rows for up rows": Fault(PLAIN, "o_ += (m_ // 8) % 2 *", "o_ += 0 *", "plain"),
    "the next row's columns": Fault(PLAIN, "(k_ < WIDTH - k * BK)", "(k_ < BK + 0 * k)", "plain"),
    "another expert's rows": Fault(
        PLAIN, "expert.to(tl.int64) * ROWS", "expert.to(tl.int64) * 0", "plain"
    ),
}


@cache
def inputs(case):
    generator = torch.Generator().manual_seed(5)
    x_TL = torch.randn(TOKENS, WIDTH if case != "plain" else 40, generator=generator)
    expert_TR = torch.rand(TOKENS, EXPERTS, generator=generator).argsort(1)
    made = {"x_TL": x_TL, "expert_TR": expert_TR, "beta": 4.0, "linear_beta": 25.0}
    made["weight_TR"] = torch.randn(TOKENS, EXPERTS, generator=generator)
    if case != "plain":
        w13 = packed(generator, EXPERTS, 2 * INNER, WIDTH, (122, 126))
        w2 = packed(generator, EXPERTS, WIDTH, 64, (122, 126))
        made |= {"w13_EMKW": tiled(w13, gated=True), "w2_EMKW": tiled(w2, gated=False)}
        return made | {"wide": False}
    made["w13_E2IL"] = torch.randn(EXPERTS, 2 * INNER, 40, generator=generator)
    return made | {"w2_ELI": torch.randn(EXPERTS, 40, INNER, generator=generator)}


@cache
def truth(case):
    op = mxfp4_oracle.experts_mxfp4 if case != "plain" else oracle.experts
    return run(op, as_double(inputs(case)), grad=False)


def found(case, monkeypatch):
    """Every comparison of the kernels as they are now with the truth."""
    if case == "mxfp4 in two":
        monkeypatch.setattr(triton_products, "tile_for", lambda *_: IN_TWO)
    op = triton_mxfp4.experts_mxfp4 if case != "plain" else triton.experts
    got = run(op, dict(inputs(case)), grad=False)
    return list(compare(got, truth(case), FP32[torch.float32]))


@pytest.mark.parametrize("case", ["mxfp4", "mxfp4 in two", "plain"])
def test_nothing_is_red_without_a_fault(case, monkeypatch):
    assert [each for each in found(case, monkeypatch) if not each.error <= each.bound] == []


@pytest.mark.parametrize("name", FAULTS)
def test_a_planted_fault_is_seen(name, tmp_path, monkeypatch):
    fault = FAULTS[name]
    plant_in_source(*fault[:3], USERS, tmp_path, monkeypatch)
    assert any(not each.error <= each.bound for each in found(fault.case, monkeypatch))
