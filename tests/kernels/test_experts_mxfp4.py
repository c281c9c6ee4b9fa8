"""Experts from MXFP4: the tiles' order, every code and scale, and which program takes what."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from perilune.kernels.experts import (
    _from_mxfp4,
    mxfp4_oracle,
    mxfp4_reference,
    packed,
    triton_mxfp4,
    triton_products,
    triton_schedule,
)
from perilune.kernels.experts.tiles import Packed, is_wide, tiled, untiled, values
from perilune.kernels.experts.triton_products import FP32_TILE, TILES, down, tile_for
from perilune.kernels.experts.triton_schedule import num_tiles, plan, schedule
from perilune.model import mxfp4

CODES = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0]


def generator(seed=0):
    return torch.Generator().manual_seed(seed)


@settings(max_examples=25, deadline=None)
@given(st.integers(1, 140), st.integers(1, 9), st.booleans(), st.integers(0, 99))
def test_tiles_are_undone(rows, groups, gated, seed):
    rows += rows % 2
    plain = packed(generator(seed), 2, rows, 32 * groups, (0, 255))
    tiles = tiled(plain, gated=gated)
    assert tiles.dtype == torch.int32
    assert tiles.shape == (2, 2 * -(-_run(rows, gated) // 128), -(-groups // 4), 1088)
    assert all(map(torch.equal, untiled(tiles, rows, 32 * groups, gated=gated), plain))


def _run(rows, gated):
    return 2 * (-(-rows // 2 // 8) * 8) if gated else rows


def test_what_pads_is_zero():
    tiles = tiled(packed(generator(), 1, 4, 32, (127, 127)), gated=True)
    every = untiled(tiles, 128, 128, gated=False)
    assert int((every.codes_EOI != 0).sum()) <= 4 * 16
    assert int(every.scale_EOG.count_nonzero()) == 4


def test_values_are_the_model_s():
    plain = packed(generator(), 3, 6, 64, (0, 254))
    assert torch.equal(values(plain, torch.float32), mxfp4.unpack(mxfp4.Packed(*plain)))
    gone = Packed(plain.codes_EOI, torch.full_like(plain.scale_EOG, 255))
    assert values(gone, torch.float32).isnan().all()


def weights_by_kernel(plain, wide):
    """What the products take for the weights: those of unit vectors."""
    (_, rows, half), columns = plain.codes_EOI.shape, 2 * plain.codes_EOI.shape[2]
    assert half * 2 == columns
    start_E = torch.tensor([0, columns], dtype=torch.int32)
    tile_I3 = schedule(start_E, columns, FP32_TILE.tokens)
    w2_EMKW = tiled(plain, gated=False)
    return down(torch.eye(columns), tile_I3, w2_EMKW, wide, rows, FP32_TILE).T


@pytest.mark.parametrize("scale", [0, 1, 2, 63, 127, 128, 129, 200, 251, 252])
def test_every_code_with_any_scale(scale):
    codes = torch.arange(16, dtype=torch.uint8).repeat(2)
    row = codes[::2] | (codes[1::2] << 4)
    plain = Packed(row.repeat(1, 3, 1), torch.full((1, 3, 1), scale, dtype=torch.uint8))
    got = weights_by_kernel(plain, wide=is_wide(plain))
    want = torch.tensor(CODES, dtype=torch.float64).repeat(2) * 2.0 ** (scale - 127)
    assert torch.equal(got.double(), want.expand(3, -1))


def test_each_group_and_row_has_its_own_scale():
    plain = packed(generator(), 1, 130, 288, (100, 140))
    got = weights_by_kernel(plain, wide=True)
    assert torch.equal(got, values(plain, torch.float32)[0])


def test_a_scale_that_is_no_number():
    plain = packed(generator(), 1, 2, 32, (127, 127))
    plain.scale_EOG[0, 1] = 255
    assert is_wide(plain)
    got = weights_by_kernel(plain, wide=True)
    assert got[1].isnan().all()
    assert torch.equal(got[0], values(plain, torch.float32)[0, 0])


@pytest.mark.filterwarnings("ignore::RuntimeWarning")
@pytest.mark.parametrize("scale", [253, 254])
def test_the_largest_scales(scale):
    """Finite codes stay so; what fp32 cannot hold is infinite, as in the reference."""
    codes = torch.full((1, 1, 16), 0x33, dtype=torch.uint8)
    plain = Packed(codes, torch.full((1, 1, 1), scale, dtype=torch.uint8))
    assert torch.equal(weights_by_kernel(plain, wide=True)[0], values(plain, torch.float32)[0, 0])
    plain = Packed(torch.full_like(codes, 0x77), plain.scale_EOG)
    assert not weights_by_kernel(plain, wide=True).isfinite().any()


@settings(max_examples=30, deadline=None)
@given(
    st.lists(st.sampled_from([0, 0, 1, 2, 15, 16, 17, 40]), min_size=1, max_size=9),
    st.sampled_from([16, 32]),
)
def test_every_place_is_in_one_tile_of_its_expert(counts, tokens):
    ends = torch.tensor([0, *counts]).cumsum(0)
    pairs = int(ends[-1])
    if not pairs:
        return
    tiles = schedule(ends.int(), pairs, tokens).tolist()
    assert len(tiles) == num_tiles(pairs, len(counts), tokens)
    taken = [(place, e) for e, first, end in tiles if e >= 0 for place in range(first, end)]
    want = [(p, e) for e in range(len(counts)) for p in range(int(ends[e]), int(ends[e + 1]))]
    assert taken == want
    assert all(end - first <= tokens for e, first, end in tiles if e >= 0)


@pytest.mark.parametrize(
    ("tokens", "want"),
    [(1, 16), (32, 16), (128, 16), (256, 16), (1024, 32), (3072, 64), (4096, 96)],
)
def test_tiles_of_k3(tokens, want):
    assert tile_for(16 * tokens, 896, torch.bfloat16).tokens == want
    assert tile_for(2 * tokens, 112, torch.bfloat16).tokens == want
    assert tile_for(16 * tokens, 896, torch.float32) == FP32_TILE


def test_few_pairs_of_many_experts_are_not_one_tile():
    assert tile_for(2048, 4096, torch.bfloat16) == TILES[16]
    assert tile_for(2048, 1, torch.bfloat16) == TILES[96]


def drawn(tokens=11, experts=5):
    inputs = _from_mxfp4(generator(3), torch.float32, tokens, experts).values()
    return [x.detach() if isinstance(x, torch.Tensor) else x for x in inputs]


@pytest.mark.parametrize("tile", TILES.values(), ids=TILES)
def test_every_tile_with_full_and_ragged_experts(tile, monkeypatch):
    inputs = drawn(tokens=231, experts=5)
    counts = torch.tensor([64, 70, 0, 96, 1])
    inputs[1] = torch.arange(5).repeat_interleave(counts).flip(0)[:, None]
    inputs[2] = inputs[2][:, :1]
    monkeypatch.setattr(triton_products, "tile_for", lambda *_: tile)
    want = mxfp4_oracle.experts_mxfp4(*inputs)
    got = triton_mxfp4.experts_mxfp4(*inputs)
    assert ((got - want).norm(dim=1) < 1e-5 * want.norm(dim=1)).all()


def test_nobody_s_pairs_add_nothing():
    inputs = drawn()
    want = mxfp4_oracle.experts_mxfp4(*inputs)
    inputs[1] = torch.cat([inputs[1], torch.full((11, 1), -1)], 1)
    inputs[2] = torch.cat([inputs[2], torch.full((11, 1), torch.nan)], 1)
    got = triton_mxfp4.experts_mxfp4(*inputs)
    assert (got - want).norm() < 1e-5 * want.norm()


@pytest.mark.parametrize("tokens", [1, 4])
def test_few_pairs_are_a_tile_each(tokens, monkeypatch):
    inputs = drawn(tokens=tokens, experts=40)
    inputs[1][-1, -1], inputs[2][-1, -1] = -1, torch.nan
    want = triton_mxfp4.experts_mxfp4(*inputs)
    assert plan(inputs[1], 40, 16).pair_P is None
    monkeypatch.setattr(triton_schedule, "FEW_PAIRS", 0)
    assert plan(inputs[1], 40, 16).pair_P is not None
    assert torch.equal(triton_mxfp4.experts_mxfp4(*inputs), want)
    assert want.isfinite().all()


def test_no_token_at_all():
    inputs = drawn()
    none = [x[:0] for x in inputs[:3]]
    assert triton_mxfp4.experts_mxfp4(*none, *inputs[3:]).shape == (0, 32)


def test_gradients_are_the_reference_s():
    inputs = drawn()
    grads = []
    for run in (triton_mxfp4.experts_mxfp4, mxfp4_reference.experts_mxfp4):
        x, weight = (inputs[i].clone().requires_grad_() for i in (0, 2))
        y = run(x, inputs[1], weight, *inputs[3:])
        grads.append(torch.autograd.grad(y.sum(), (x, weight)))
    assert all(map(torch.equal, *grads))


def test_many_tokens_are_taken_in_parts(monkeypatch):
    inputs = drawn()
    whole = triton_mxfp4.experts_mxfp4(*inputs)
    monkeypatch.setattr(triton_mxfp4, "MOST_TOKENS", 4)
    assert torch.equal(triton_mxfp4.experts_mxfp4(*inputs), whole)
