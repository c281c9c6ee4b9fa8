"""How another attention over residual sources is called, at its best setting.

fla-core 0.6: `fused_attnres`. It takes the sources one by one, and the pseudo-query apart from the
norm weight, which is one here. Level 0 keeps the mixture for backward: the faster of the two.
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
    sources = [x.detach().requires_grad_(backward) for x in inputs["sources_NTD"]]
    query_D = inputs["query_D"]
    ones_D = torch.ones_like(query_D, requires_grad=False)
    settings: dict[str, Any] = {"rms_eps": inputs["eps"], "checkpoint_level": 0}
    grad_outputs: list[Tensor] = []

    def call() -> Tensor:
        h_TD = attnres(query_D, sources, ones_D, **settings)
        if backward:
            if not grad_outputs:
                grad_outputs.append(projection(h_TD.detach()))
            torch.autograd.grad([h_TD], [*sources, query_D], grad_outputs)
        return h_TD

    return Bound(call, lambda h_TD: [h_TD])


FLA = Peer(
    name="fla fused_attnres",
    distribution="fla-core",
    module="fla",
    bind=f"{__name__}:{fla_attnres.__name__}",
)
