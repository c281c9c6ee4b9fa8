"""MXFP4: every code with every scale, the rounding rule, and one grid for packing and training."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from perilune.core.errors import CheckpointError
from perilune.kernels.common.mxfp4 import CODE_VALUES
from perilune.model.mxfp4 import Packed, fake_quantize, pack, unpack

SIGNED = [*CODE_VALUES, *(-value for value in CODE_VALUES)]


def every_code_and_scale() -> Packed:
    """Row s holds all 16 codes twice, at scale byte s: even columns 0..15, odd ones 15..0."""
    code = torch.arange(16, dtype=torch.uint8)
    row = code | (code.flip(0) << 4)
    return Packed(row.repeat(255, 1), torch.arange(255, dtype=torch.uint8)[:, None])


def bits(x: torch.Tensor) -> torch.Tensor:
    return x.contiguous().view(torch.int32)


def test_every_code_and_scale_unpacks_by_the_definition():
    weight = unpack(every_code_and_scale())
    even, odd = weight[:, 0::2].double(), weight[:, 1::2].double()
    table = torch.tensor(SIGNED, dtype=torch.float64)
    scale = torch.exp2(torch.arange(255, dtype=torch.float64) - 127)[:, None]
    wanted = table * scale
    wanted = torch.where(wanted.abs() >= 2.0**128, wanted.sign() * torch.inf, wanted)
    assert torch.equal(even, wanted)
    assert torch.equal(odd, wanted.flip(1))


def test_unpack_agrees_with_mlx():
    import mlx.core as mx

    packed = every_code_and_scale()
    theirs = mx.dequantize(
        mx.array(packed.weight_packed.numpy()).view(mx.uint32),
        mx.array(packed.weight_scale.numpy()),
        group_size=32,
        bits=4,
        mode="mxfp4",
    )
    ours = unpack(packed)
    assert np.array_equal(np.array(theirs.astype(mx.float32)), ours.numpy())


def test_scale_255_is_a_corrupt_file():
    packed = every_code_and_scale()
    packed.weight_scale[7, 0] = 255
    with pytest.raises(CheckpointError, match="255"):
        unpack(packed)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_unpacked_weights_pack_to_the_same_values(dtype):
    packed = every_code_and_scale()
    packed = Packed(packed.weight_packed[:253], packed.weight_scale[:253])  # finite ones
    weight = unpack(packed)
    assert torch.equal(bits(unpack(pack(weight.to(dtype)))), bits(weight))


def test_packing_is_idempotent_byte_for_byte():
    weight = torch.randn(64, 96, generator=torch.Generator().manual_seed(0))
    once = pack(weight)
    again = pack(unpack(once))
    assert torch.equal(once.weight_packed, again.weight_packed)
    assert torch.equal(once.weight_scale, again.weight_scale)


def test_rounding_is_to_nearest_with_ties_to_the_even_code():
    ties = [0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0, 0.26, 0.74, 2.6, 5.1, 7.9]
    wanted = [0.0, 1.0, 1.0, 2.0, 2.0, 4.0, 4.0, 0.5, 0.5, 3.0, 6.0, 6.0]
    row = torch.tensor([ties + [-t for t in ties] + [4.0] * 8])
    expected = torch.tensor([wanted + [-w for w in wanted] + [4.0] * 8])
    packed = pack(row)
    assert packed.weight_scale.tolist() == [[127]]
    assert torch.equal(bits(unpack(packed)), bits(expected))


@pytest.mark.parametrize(
    ("largest", "byte"),
    [
        (1.0, 125),
        (1.99, 125),
        (2.0, 126),
        (6.0, 127),
        (7.99, 127),
        (8.0, 128),
        (0.0, 0),
        (1e-40, 0),
    ],
)
def test_the_scale_is_the_exponent_of_the_largest_less_two(largest, byte):
    row = torch.zeros(1, 32)
    row[0, 5] = -largest
    assert pack(row).weight_scale.tolist() == [[byte]]


@settings(max_examples=60)
@given(
    seed=st.integers(0, 2**32 - 1),
    exponent=st.integers(-140, 120),
    spread=st.integers(0, 60),
    dtype=st.sampled_from([torch.float32, torch.bfloat16]),
)
def test_training_and_packing_share_one_grid(seed, exponent, spread, dtype):
    generator = torch.Generator().manual_seed(seed)
    weight = torch.randn(2, 5, 64, generator=generator).clamp(-8, 8)
    powers = exponent - torch.randint(0, spread + 1, weight.shape, generator=generator)
    weight = torch.ldexp(weight, powers).to(dtype)
    fake = fake_quantize(weight)
    assert fake.dtype == dtype
    assert torch.equal(bits(fake.float()), bits(unpack(pack(weight))))


def test_nearest_on_the_grid_by_exhaustive_search():
    weight = torch.randn(40, 32, generator=torch.Generator().manual_seed(3))
    scale = torch.exp2(weight.abs().amax(1, keepdim=True).log2().floor() - 2)
    grid = torch.tensor(SIGNED)
    distance = (weight[..., None] / scale[..., None] - grid).abs()
    best = grid[distance.argmin(-1)] * scale
    assert torch.equal(fake_quantize(weight), best)


def test_the_gradient_passes_straight_through():
    weight = torch.randn(3, 64, requires_grad=True)
    upstream = torch.randn(3, 64)
    fake_quantize(weight).backward(upstream)
    assert weight.grad is not None
    assert torch.equal(weight.grad, upstream)


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
def test_weights_that_are_not_finite_are_refused(bad):
    weight = torch.zeros(2, 32)
    weight[1, 3] = bad
    with pytest.raises(ValueError, match="infinities or NaN"):
        pack(weight)


def test_columns_must_fill_their_groups():
    with pytest.raises(ValueError, match="multiples of 32"):
        pack(torch.zeros(2, 40))
