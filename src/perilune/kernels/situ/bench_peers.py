"""How another GLU is called. fla-core 0.6 has `swiglu` and no SiTU: a peer without caps only."""

from __future__ import annotations

from importlib import import_module

import torch
from torch import Tensor

from perilune.kernels.bench.cases import Bound, Peer
from perilune.kernels.bench.inputs import projection
from perilune.kernels.registry import Inputs


def fla_swiglu(inputs: Inputs, backward: bool) -> Bound:
    swiglu = import_module("fla.modules.activations").swiglu
    assert inputs["beta"] is inputs["linear_beta"] is None
    halves = [x.detach().requires_grad_(backward) for x in inputs["gate_up_2I"].chunk(2, dim=-1)]
    grad_outputs: list[Tensor] = []

    def call() -> Tensor:
        y_I = swiglu(*halves)
        if backward:
            if not grad_outputs:
                grad_outputs.append(projection(y_I.detach()))
            torch.autograd.grad([y_I], halves, grad_outputs)
        return y_I

    return Bound(call, lambda y_I: [y_I])


FLA = Peer(
    name="fla swiglu",
    distribution="fla-core",
    module="fla",
    bind=f"{__name__}:{fla_swiglu.__name__}",
)
