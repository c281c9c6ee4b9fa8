"""How another attention over residual sources is called, at its best setting.

fla-core 0.6: `fused_attnres`. It takes the sources one by one, and the pseudo-query apart from the
norm weight, which is one here; it can norm the mixture with the eps of the sources, which is
therefore the same here, and the update is added before it. Level 0 keeps the mixture for backward:
the faster of the two.
"""

from __future__ import annotations

from importlib import import_module
from typing import Any

import torch
from torch import Tensor

from perilune.kernels.bench.cases import Bound, Peer
from perilune.kernels.bench.inputs import projection
from perilune.kernels.registry import Inputs


def fla_attnres(inputs: Inputs, backward: bool) -> Bound:
    attnres = import_module("fla.ops.attnres").fused_attnres
    named = {
        name: inputs[name].detach().requires_grad_(backward)
        for name in ("partial_TD", "update_TD", "query_D", "weight_D")
        if name in inputs
    }
    blocks = [x.detach().requires_grad_(backward) for x in inputs["blocks_NTD"]]
    ones_D = torch.ones_like(inputs["query_D"], requires_grad=False)
    settings: dict[str, Any] = {"rms_eps": inputs["eps"], "checkpoint_level": 0}
    if "weight_D" in named:
        assert inputs["norm_eps"] == inputs["eps"]
        settings["output_rms_weight"] = named["weight_D"]
    grad_outputs: list[Tensor] = []

    def forward() -> list[Tensor]:
        if "update_TD" not in named:
            return [attnres(named["query_D"], [*blocks, named["partial_TD"]], ones_D, **settings)]
        total_TD = named["partial_TD"] + named["update_TD"]
        return [attnres(named["query_D"], [*blocks, total_TD], ones_D, **settings), total_TD]

    def call() -> list[Tensor]:
        outputs = forward()
        if backward:
            if not grad_outputs:
                grad_outputs.extend(projection(x.detach()) for x in outputs)
            torch.autograd.grad(outputs, [*blocks, *named.values()], grad_outputs)
        return outputs

    return Bound(call, lambda outputs: outputs)


FLA = Peer(
    name="fla fused_attnres",
    distribution="fla-core",
    module="fla",
    bind=f"{__name__}:{fla_attnres.__name__}",
)
