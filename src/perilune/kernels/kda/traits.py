"""Kimi Delta Attention for the property checks: how to draw it, and its gate regimes."""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise

import torch
from torch import Tensor

from perilune.kernels.common.cases import normal
from perilune.kernels.common.packing import Packing
from perilune.kernels.registry import Inputs
from perilune.kernels.traits import OneToken, Traits

HEADS = 2


def _make(
    generator: torch.Generator, dtype: torch.dtype, lengths: tuple[int, ...], width: int
) -> Inputs:
    t = sum(lengths)

    def draw(*shape: int, scale: float = 1.0) -> Tensor:
        return normal(generator, dtype, *shape, scale=scale)

    return {
        "q_THK": draw(t, HEADS, width),
        "k_THK": draw(t, HEADS, width),
        "v_THV": draw(t, HEADS, width),
        "z_THK": draw(t, HEADS, width),
        "b_TH": draw(t, HEADS),
        "A_log_H": draw(HEADS, scale=0.5),
        "dt_bias_HK": draw(HEADS, width, scale=0.3),
        "packing": Packing.of(lengths),
        "lower_bound": -5.0,
        "state_NHKV": draw(len(lengths), HEADS, width, width),
    }


def _one_token(inputs: Inputs) -> Inputs:
    """What `reference.kda_decode` is given: a row is a token."""
    names = {"_THK": "_NHK", "_THV": "_NHV", "_TH": "_NH"}
    step = {}
    for name, value in inputs.items():
        for old, new in names.items():
            name = name.removesuffix(old) + new if name.endswith(old) else name
        step[name] = value
    del step["packing"]
    return step


def _gate(inputs: Inputs, z: Tensor, lower_bound: float | None = -5.0) -> Inputs:
    """Gates of `z` alone. At their ends their own gradient is rounding, so it is not asked for."""
    plain = {k: torch.zeros_like(inputs[k].detach()) for k in ("A_log_H", "dt_bias_HK")}
    z_THK = z.to(inputs["z_THK"].dtype)
    return inputs | plain | {"z_THK": z_THK, "lower_bound": lower_bound}


def _z(inputs: Inputs) -> Tensor:
    return inputs["z_THK"].detach()


def _at_the_bound(inputs: Inputs) -> Inputs:
    return _gate(inputs, torch.full_like(_z(inputs), 40.0))


def _open(inputs: Inputs) -> Inputs:
    return _gate(inputs, torch.full_like(_z(inputs), -40.0))


def _one_channel(inputs: Inputs) -> Inputs:
    z = torch.full_like(_z(inputs), -40.0)
    z[..., -1] = 40.0
    return _gate(inputs, z)


def _mixed(inputs: Inputs) -> Inputs:
    return _gate(inputs, 40 * _z(inputs).sign())


def _softplus(to: float) -> Callable[[Inputs], Inputs]:
    """The unbounded gate, down to `to` a token."""

    def change(inputs: Inputs) -> Inputs:
        z = _z(inputs)
        ends = torch.where(torch.arange(z.shape[-1]) % 2 == 0, -to, to)
        return _gate(inputs, ends.expand_as(z).clone(), lower_bound=None)

    return change


def _long_memory(inputs: Inputs) -> Inputs:
    """Nothing fades; no query in the first half of a sequence, no value in its second half."""
    inputs = _gate(inputs, torch.full_like(_z(inputs), -8.0))
    q_THK, v_THV = (inputs[name].detach().clone() for name in ("q_THK", "v_THV"))
    ends = inputs["packing"].cu_seqlens
    for start, end in pairwise(ends):
        q_THK[start : (start + end) // 2] = 0
        v_THV[(start + end) // 2 : end] = 0
    return inputs | {"q_THK": q_THK, "v_THV": v_THV, "b_TH": torch.full_like(inputs["b_TH"], 1.4)}


_REGIMES = {
    "every_gate_at_the_bound": _at_the_bound,
    "every_gate_near_zero": _open,
    "one_channel_saturated": _one_channel,
    "gates_at_both_ends": _mixed,
    "softplus_to_-6": _softplus(-6.0),
    "softplus_to_-20": _softplus(-20.0),
}

CHUNK = Traits(
    make=_make,
    tokens={"q_THK": 0, "k_THK": 0, "v_THV": 0, "z_THK": 0, "b_TH": 0},
    sequences={"state_NHKV": 0},
    state_outputs={"state_NHKV": 1},
    packing="packing",
    scaled=("q_THK", "k_THK", "v_THV", "z_THK", "b_TH"),
    regimes=_REGIMES | {"long_memory": _long_memory},
    one_token=OneToken("perilune.kernels.kda.reference:kda_decode", ("state_NHKV",), _one_token),
    rounding_sees_ahead=frozenset({"reference", "cuda"}),
    # The table of chunks is made by the first call of the same lengths, before a capture.
    graphs=frozenset({"cuda"}),
)
