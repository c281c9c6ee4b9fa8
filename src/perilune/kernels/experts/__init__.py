"""Routed expert MLPs, of weights in any float dtype and of packed MXFP4."""

from __future__ import annotations

import torch

from perilune.kernels.common.cases import BF16, FP32, normal
from perilune.kernels.common.mxfp4 import GROUP
from perilune.kernels.experts.tiles import Packed, tiled
from perilune.kernels.registry import Inputs, OpSpec


def _inputs(
    generator: torch.Generator, dtype: torch.dtype, tokens: int, experts: int, *, only: int = 0
) -> Inputs:
    # A grouped product in bf16 takes rows of whole 16 bytes only.
    r, width, inner = (2, 6, 10) if dtype == torch.float32 else (2, 16, 24)
    pool = only or experts
    order = torch.rand(tokens, pool, generator=generator).argsort(1)[:, : min(r, pool)]
    return {
        "x_TL": normal(generator, dtype, tokens, width),
        "expert_TR": order,
        "weight_TR": normal(generator, dtype, *order.shape),
        "w13_E2IL": normal(generator, dtype, experts, 2 * inner, width),
        "w2_ELI": normal(generator, dtype, experts, width, inner),
        "beta": 4.0,
        "linear_beta": 25.0,
    }


def _held_as_bf16(
    generator: torch.Generator, dtype: torch.dtype, tokens: int, experts: int = 5
) -> Inputs:
    inputs = _inputs(generator, dtype, tokens, experts)
    narrow = {k: inputs[k].detach().bfloat16() for k in ("w13_E2IL", "w2_ELI")}
    return inputs | narrow


def _elsewhere(inputs: Inputs) -> Inputs:
    """All experts of the first token, and one of some others, are on another GPU."""
    expert_TR = inputs["expert_TR"].masked_fill(inputs["expert_TR"] == 2, -1)
    expert_TR[0] = -1
    return inputs | {"expert_TR": expert_TR}


SPEC = OpSpec(
    name="experts",
    signature="(x_TL, expert_TR, weight_TR, w13_E2IL, w2_ELI, beta, linear_beta) -> y_TL",
    reference="perilune.kernels.experts.reference:experts",
    oracle="perilune.kernels.experts.oracle:experts",
    backends={
        "cpu": "perilune.kernels.experts.cpu:experts",
        "cuda": "perilune.kernels.experts.triton:experts",
    },
    cases={
        "spread": lambda g, d: _inputs(g, d, 11, 5),
        "swi_glu": lambda g, d: _inputs(g, d, 3, 5) | {"beta": None, "linear_beta": None},
        "one_token": lambda g, d: _inputs(g, d, 1, 5),
        "one_overloaded": lambda g, d: _inputs(g, d, 11, 5, only=1),
        "bf16_weights": lambda g, d: _held_as_bf16(g, d, 7),
        "bf16_weights_one_token": lambda g, d: _held_as_bf16(g, d, 1),
        "bf16_weights_one_expert": lambda g, d: _held_as_bf16(g, d, 3, 1),
        "bf16_weights_swi_glu": lambda g, d: (
            _held_as_bf16(g, d, 5) | {"beta": None, "linear_beta": None}
        ),
        "bf16_weights_other_caps": lambda g, d: (
            _held_as_bf16(g, d, 5) | {"beta": 1.5, "linear_beta": 2.5}
        ),
        "single_expert": lambda g, d: _inputs(g, d, 4, 1),
        "elsewhere": lambda g, d: _elsewhere(_inputs(g, d, 11, 5)),
        "bf16_weights_elsewhere": lambda g, d: _elsewhere(_held_as_bf16(g, d, 7)),
    },
    tolerance=FP32,
    traits="perilune.kernels.experts.traits:SPEC",
    backend_tolerance={"cuda": FP32 | BF16},
)


def packed(
    generator: torch.Generator, experts: int, rows: int, columns: int, scales: tuple[int, int]
) -> Packed:
    """Any codes, and scale bytes from the first up to the last of `scales`."""
    low, high = scales
    codes = torch.randint(0, 256, (experts, rows, columns // 2), generator=generator)
    shape = experts, rows, -(-columns // GROUP)
    groups = torch.randint(low, high + 1, shape, generator=generator)
    return Packed(codes.to(torch.uint8), groups.to(torch.uint8))


def _from_mxfp4(
    generator: torch.Generator,
    dtype: torch.dtype,
    tokens: int,
    experts: int,
    *,
    width: int = 32,
    inner: int = 64,
    only: int = 0,
    scales: tuple[int, int] = (122, 125),
) -> Inputs:
    pool = only or experts
    order = torch.rand(tokens, pool, generator=generator).argsort(1)[:, : min(2, pool)]
    return {
        "x_TL": normal(generator, dtype, tokens, width),
        "expert_TR": order,
        "weight_TR": normal(generator, dtype, *order.shape),
        "w13_EMKW": tiled(packed(generator, experts, 2 * inner, width, scales), gated=True),
        "w2_EMKW": tiled(packed(generator, experts, width, inner, scales), gated=False),
        "wide": scales[1] > 128,
        "beta": 4.0,
        "linear_beta": 25.0,
    }


def shared_out(
    generator: torch.Generator,
    dtype: torch.dtype,
    counts: tuple[int, ...],
    *,
    width: int = 32,
    inner: int = 64,
) -> Inputs:
    """So many tokens with each expert, and two with none."""
    expert_P = torch.arange(len(counts)).repeat_interleave(torch.tensor(counts))
    expert_P = torch.cat([expert_P, torch.full((2,), -1)])
    expert_T1 = expert_P[torch.randperm(len(expert_P), generator=generator)][:, None]
    tokens, experts = len(expert_T1), len(counts)
    inputs = _from_mxfp4(generator, dtype, tokens, experts, width=width, inner=inner)
    return inputs | {"expert_TR": expert_T1, "weight_TR": inputs["weight_TR"][:, :1]}


MXFP4 = OpSpec(
    name="experts_mxfp4",
    signature="(x_TL, expert_TR, weight_TR, w13_EMKW, w2_EMKW, wide, beta, linear_beta) -> y_TL",
    reference="perilune.kernels.experts.mxfp4_reference:experts_mxfp4",
    oracle="perilune.kernels.experts.mxfp4_oracle:experts_mxfp4",
    backends={"cuda": "perilune.kernels.experts.triton_mxfp4:experts_mxfp4"},
    cases={
        "spread": lambda g, d: _from_mxfp4(g, d, 11, 5),
        "one_token": lambda g, d: _from_mxfp4(g, d, 1, 5),
        "one_overloaded": lambda g, d: _from_mxfp4(g, d, 35, 5, only=1),
        "single_expert": lambda g, d: _from_mxfp4(g, d, 4, 1),
        "odd_tails": lambda g, d: _from_mxfp4(g, d, 6, 3, width=160, inner=96),
        "swi_glu": lambda g, d: _from_mxfp4(g, d, 3, 5) | {"beta": None, "linear_beta": None},
        "wide_scales": lambda g, d: _from_mxfp4(g, d, 5, 3, scales=(118, 131)),
        "other_caps": lambda g, d: _from_mxfp4(g, d, 3, 4) | {"beta": 1.5, "linear_beta": 2.5},
        "elsewhere": lambda g, d: _elsewhere(_from_mxfp4(g, d, 11, 5)),
        # On Hopper: products for every eight tokens of an expert, columns in a ring of four tiles.
        "up_to_32_each": lambda g, d: shared_out(g, d, (5, 11, 20, 29), width=40),
        "crowded": lambda g, d: shared_out(g, d, (45, 98), width=40),
        "long_rows": lambda g, d: _from_mxfp4(g, d, 7, 3, width=520, inner=96),
        "long_rows_crowded": lambda g, d: _from_mxfp4(g, d, 35, 1, width=520, inner=32),
    },
    tolerance=FP32,
    traits="perilune.kernels.experts.mxfp4_traits:SPEC",
    backend_tolerance={"cuda": FP32 | BF16},
)
