"""How other RMS norms are called, at their best setting.

fla-core 0.6: `rms_norm`, and `rms_norm_gated` with a sigmoid for its gate.
"""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from typing import Any

import torch
from torch import Tensor

from perilune.kernels.bench.cases import Bound, Peer
from perilune.kernels.bench.inputs import projection
from perilune.kernels.registry import Inputs


def fla_norm(inputs: Inputs, backward: bool) -> Bound:
    norm = import_module("fla.modules.norm.layernorm").rms_norm
    x_D, weight_D, eps = inputs["x_D"], inputs["weight_D"], inputs["eps"]
    return _bound(lambda: norm(x_D, weight_D, None, eps=eps), [x_D, weight_D], backward)


def fla_gated_norm(inputs: Inputs, backward: bool) -> Bound:
    norm = import_module("fla.modules.norm.fused_norm_gate").rms_norm_gated
    operands = [inputs[name] for name in ("x_D", "gate_D", "weight_D")]
    settings = {"activation": "sigmoid", "eps": inputs["eps"]}
    return _bound(lambda: norm(*operands, None, **settings), operands, backward)


def _bound(forward: Callable[[], Tensor], leaves: list[Tensor], backward: bool) -> Bound:
    if not backward:
        return Bound(forward, _alone)
    grad_outputs: list[Tensor] = []

    def call() -> Any:
        y_D = forward()
        if not grad_outputs:
            grad_outputs.append(projection(y_D.detach()))
        torch.autograd.grad([y_D], leaves, grad_outputs)
        return y_D

    return Bound(call, _alone)


def _alone(y_D: Tensor) -> list[Tensor]:
    return [y_D]


def _peer(name: str, function: Callable[..., Bound]) -> Peer:
    bind = f"{__name__}:{function.__name__}"
    return Peer(name=name, distribution="fla-core", module="fla", bind=bind)


FLA = _peer("fla rms_norm", fla_norm)
FLA_GATED = _peer("fla rms_norm_gated", fla_gated_norm)
