"""One step of a KDA layer for the property checks."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from perilune.kernels.common.cases import normal
from perilune.kernels.common.few_tokens import fp32_inference
from perilune.kernels.registry import Inputs
from perilune.kernels.traits import Drafts, Traits

HEADS, TAPS, SPARE_SLOTS = 2, 4, 3


def _drafts(generator: torch.Generator, dtype: torch.dtype, n: int, length: int) -> Inputs:
    return _make(generator, dtype, n, length, 16)


def _make(
    generator: torch.Generator, dtype: torch.dtype, n: int, length: int, width: int
) -> Inputs:
    t, pool, channels = n * length, n + SPARE_SLOTS, 3 * HEADS * width

    def draw(*shape: int, scale: float = 1.0) -> Tensor:
        return normal(generator, dtype, *shape, scale=scale).detach()

    return {
        "qkv_TC": draw(t, channels),
        "z_THK": draw(t, HEADS, width),
        "b_TH": draw(t, HEADS),
        "gate_THV": draw(t, HEADS, width),
        "conv_CW": draw(channels, TAPS, scale=0.5),
        "A_log_H": draw(HEADS, scale=0.5),
        "dt_bias_HK": draw(HEADS, width, scale=0.3),
        "norm_V": draw(width),
        "window_SWC": draw(pool, TAPS - 1, channels),
        "state_SHKV": draw(pool, HEADS, width, width),
        "slot_N": torch.randperm(pool, generator=generator)[:n],
        "lower_bound": -5.0,
        "eps": 1e-5,
        "keep_N": None,
    }


def _cpu_serves(inputs: Inputs) -> bool:
    pools = (inputs["window_SWC"], inputs["state_SHKV"])
    return fp32_inference(inputs["qkv_TC"]) and all(pool.is_contiguous() for pool in pools)


def _gates(z: float, lower_bound: float | None = -5.0) -> Callable[[Inputs], Inputs]:
    def change(inputs: Inputs) -> Inputs:
        plain = {k: torch.zeros_like(inputs[k]) for k in ("A_log_H", "dt_bias_HK")}
        z_THK = torch.full_like(inputs["z_THK"], z)
        return inputs | plain | {"z_THK": z_THK, "lower_bound": lower_bound}

    return change


SPEC = Traits(
    make=lambda generator, dtype, lengths, width: _make(generator, dtype, sum(lengths), 1, width),
    tokens={"qkv_TC": 0, "z_THK": 0, "b_TH": 0, "gate_THV": 0},
    sequences={"slot_N": 0, "keep_N": 0},
    in_place=("window_SWC", "state_SHKV"),
    slots="slot_N",
    inert_slot=-1,
    scaled=("qkv_TC", "z_THK", "b_TH", "gate_THV"),
    regimes={
        "every_gate_at_the_bound": _gates(40.0),
        "every_gate_near_zero": _gates(-40.0),
        "softplus_to_-6": _gates(6.0, None),
        "softplus_to_-20": _gates(20.0, None),
    },
    slowest="every_gate_near_zero",
    drafts=Drafts(_drafts, "keep_N"),
    serves={"cpu": _cpu_serves},
    batch_invariant={"cpu": 256},
    graphs=frozenset({"cuda"}),
)
