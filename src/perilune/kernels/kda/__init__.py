"""Kimi Delta Attention: prefill in chunks."""

from __future__ import annotations

import torch

from perilune.kernels.common.cases import BF16, FP32, normal
from perilune.kernels.common.packing import Packing
from perilune.kernels.registry import Inputs, OpSpec


def _inputs(
    generator: torch.Generator,
    dtype: torch.dtype,
    lengths: tuple[int, ...],
    *,
    lower_bound: float | None = -5.0,
    heads: int = 2,
    width: int = 16,
    v_width: int = 16,
    qk_scale: float = 1.0,
    z_scale: float = 1.0,
    with_state: bool = False,
) -> Inputs:
    t = sum(lengths)

    def draw(*shape: int, scale: float = 1.0) -> torch.Tensor:
        return normal(generator, dtype, *shape, scale=scale)

    return {
        "q_THK": draw(t, heads, width, scale=qk_scale),
        "k_THK": draw(t, heads, width, scale=qk_scale),
        "v_THV": draw(t, heads, v_width),
        "z_THK": draw(t, heads, width, scale=z_scale),
        "b_TH": draw(t, heads),
        "A_log_H": draw(heads, scale=0.5),
        "dt_bias_HK": draw(heads, width, scale=0.3),
        "packing": Packing.of(lengths),
        "lower_bound": lower_bound,
        "state_NHKV": draw(len(lengths), heads, width, v_width) if with_state else None,
        "cuts": None,
    }


def _other_widths(
    generator: torch.Generator, dtype: torch.dtype, lengths: tuple[int, ...]
) -> Inputs:
    """Nothing square, and another bound than K3's."""
    sizes = {"heads": 3, "width": 7, "v_width": 5}
    return _inputs(generator, dtype, lengths, lower_bound=-3.0, with_state=True, **sizes)


def _as_small_as_eps(
    generator: torch.Generator, dtype: torch.dtype, lengths: tuple[int, ...]
) -> Inputs:
    return _inputs(generator, dtype, lengths, qk_scale=2e-4, with_state=True)


def _segmented(generator: torch.Generator, dtype: torch.dtype) -> Inputs:
    inputs = _inputs(generator, dtype, (70, 70))
    cuts = torch.zeros(2, 70, dtype=torch.int64)
    for row, at in ((0, 1), (0, 32), (0, 45), (1, 31), (1, 69)):
        cuts[row, at] = 1
    inputs["packing"] = Packing.rows(cuts.cumsum(1))
    return inputs


def _with_cuts(generator: torch.Generator, dtype: torch.dtype) -> Inputs:
    """Inside of a chunk, at its edges, twice in one chunk, at the end, and none at all."""
    inputs = _inputs(generator, dtype, (70, 33, 5), with_state=True)
    return inputs | {"cuts": ((1, 32, 45, 46), (33,), ())}


def _softplus_strong(generator: torch.Generator, dtype: torch.dtype) -> Inputs:
    return _inputs(generator, dtype, (70,), lower_bound=None, z_scale=30.0)


_SEQUENCES = {
    "one_token": lambda g, d: _inputs(g, d, (1,)),
    "as_small_as_eps": lambda g, d: _as_small_as_eps(g, d, (2, 3)),
    "other_widths": lambda g, d: _other_widths(g, d, (3, 35)),
    "segmented_rows": _segmented,
    "cuts": _with_cuts,
    "empty_sequence": lambda g, d: _inputs(g, d, (0, 5, 0, 33, 0), with_state=True),
    "empty_without_state": lambda g, d: _inputs(g, d, (3, 0)),
    "odd_lengths": lambda g, d: _inputs(g, d, (33, 1, 64, 7), with_state=True),
    "strongest_decay": lambda g, d: _inputs(g, d, (80,), z_scale=40.0, with_state=True),
    "softplus": lambda g, d: _inputs(g, d, (37, 70), lower_bound=None, with_state=True),
    "softplus_strong": _softplus_strong,
}


CHUNK = OpSpec(
    name="kda_chunk",
    signature="(q_THK, k_THK, v_THV, z_THK, b_TH, A_log_H, dt_bias_HK, packing, lower_bound,"
    " state_NHKV, cuts) -> (o_THV, state_NHKV, cut_EHKV)",
    reference="perilune.kernels.kda.reference:kda_chunk",
    oracle="perilune.kernels.kda.oracle:kda_recurrent",
    backends={"cuda": "perilune.kernels.kda.triton:kda_chunk"},
    cases=_SEQUENCES,
    tolerance=FP32,
    backend_tolerance={"cuda": FP32 | BF16},
    traits="perilune.kernels.kda.traits:CHUNK",
)
