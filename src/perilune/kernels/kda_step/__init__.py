"""One step of a KDA layer: convolution, recurrence and gated norm, with states in pools."""

from __future__ import annotations

import torch

from perilune.kernels.common.cases import BF16, FP32, normal
from perilune.kernels.registry import Inputs, OpSpec


def _inputs(
    generator: torch.Generator,
    dtype: torch.dtype,
    slots: tuple[int, ...],
    *,
    length: int = 1,
    keep: tuple[int, ...] | None = None,
    lower_bound: float | None = -5.0,
    widths: tuple[int, int] = (16, 16),
    scale: float = 1.0,
    z_scale: float = 1.0,
) -> Inputs:
    t, h, (k, v), pool, taps = len(slots) * length, 2, widths, 5, 4
    channels = 2 * h * k + h * v

    def draw(*shape: int, scale: float = 1.0) -> torch.Tensor:
        return normal(generator, dtype, *shape, scale=scale).detach()

    return {
        "qkv_TC": draw(t, channels, scale=scale),
        "z_THK": draw(t, h, k, scale=z_scale),
        "b_TH": draw(t, h),
        "gate_THV": draw(t, h, v),
        "conv_CW": draw(channels, taps, scale=0.5),
        "A_log_H": draw(h, scale=0.5),
        "dt_bias_HK": draw(h, k, scale=0.3),
        "norm_V": draw(v),
        "window_SWC": draw(pool, taps - 1, channels, scale=scale),
        "state_SHKV": draw(pool, h, k, v, scale=scale),
        "slot_N": torch.tensor(slots),
        "lower_bound": lower_bound,
        "eps": 1e-5,
        "keep_N": None if keep is None else torch.tensor(keep),
    }


SPEC = OpSpec(
    name="kda_step",
    signature="(qkv_TC, z_THK, b_TH, gate_THV, conv_CW, A_log_H, dt_bias_HK, norm_V, window_SWC!,"
    " state_SHKV!, slot_N, lower_bound, eps, keep_N) -> o_THV",
    reference="perilune.kernels.kda_step.reference:kda_step",
    oracle="perilune.kernels.kda_step.oracle:kda_step",
    backends={
        "cpu": "perilune.kernels.kda_step.cpu:kda_step",
        "cuda": "perilune.kernels.kda_step.triton:kda_step",
    },
    cases={
        "one": lambda g, d: _inputs(g, d, (0,)),
        "scattered_and_padding": lambda g, d: _inputs(g, d, (3, -1, 0)),
        "softplus": lambda g, d: _inputs(g, d, (1, 4), lower_bound=None),
        "softplus_strong": lambda g, d: _inputs(g, d, (1, 4), lower_bound=None, z_scale=30.0),
        "strongest_decay": lambda g, d: _inputs(g, d, (2, 0), z_scale=40.0),
        "other_widths": lambda g, d: _inputs(g, d, (2, 0), widths=(8, 24)),
        "as_small_as_eps": lambda g, d: _inputs(g, d, (2, 0), scale=2e-3),
        "drafts": lambda g, d: _inputs(g, d, (4, 1), length=3),
        "drafts_partly_kept": lambda g, d: _inputs(g, d, (4, 1, 0), length=2, keep=(0, 2, 1)),
    },
    tolerance=FP32,
    backend_tolerance={"cuda": FP32 | BF16},
    traits="perilune.kernels.kda_step.traits:SPEC",
)
