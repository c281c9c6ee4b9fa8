"""How other short convolutions are called, at their best setting.

fla-core 0.6: `causal_conv1d` on its Triton path. It keeps windows of W inputs a channel, [N, C, W],
of which the oldest is never read.
"""

from __future__ import annotations

from importlib import import_module
from typing import Any

import torch
from torch import Tensor

from perilune.kernels.bench.cases import Bound, Peer
from perilune.kernels.bench.inputs import projection
from perilune.kernels.common.packing import Packing
from perilune.kernels.registry import Inputs


def fla_conv(inputs: Inputs, backward: bool) -> Bound:
    conv = import_module("fla.modules.causal_conv1d").causal_conv1d
    x_TC, packing, window = inputs["x_TC"], inputs["packing"], inputs["window_NWC"]
    state_NCW = torch.nn.functional.pad(window.detach().mT, (1, 0)).contiguous()
    arguments = {
        "x": x_TC.view(_batch(packing), -1, x_TC.shape[1]),
        "weight": inputs["weight_CW"],
        "initial_state": state_NCW.requires_grad_(backward),
        "output_final_state": True,
        "activation": "silu",
    }
    if not packing.is_dense:
        arguments["cu_seqlens"] = torch.tensor(packing.cu_seqlens).to(x_TC.device)
    if not backward:
        return Bound(lambda: conv(**arguments), _unbatched)
    leaves = [x_TC, inputs["weight_CW"], state_NCW]
    grad_outputs: list[Tensor] = []

    def call() -> Any:
        y_BLC, after_NCW = conv(**arguments)
        if not grad_outputs:
            of_y = projection(y_BLC.detach().flatten(0, 1)).view_as(y_BLC)
            grad_outputs.extend([of_y, projection(after_NCW.detach())])
        torch.autograd.grad([y_BLC, after_NCW], leaves, grad_outputs)
        return y_BLC, after_NCW

    return Bound(call, _unbatched)


def _batch(packing: Packing) -> int:
    """Rows of its batch: the sequences where all are equally long, otherwise one with offsets."""
    return packing.num_sequences if packing.is_dense else 1


def _unbatched(out: Any) -> list[Tensor]:
    y_BLC, after_NCW = out
    return [y_BLC.flatten(0, 1), after_NCW[..., 1:].mT]


FLA = Peer(
    name="fla causal_conv1d",
    distribution="fla-core",
    module="fla",
    bind=f"{__name__}:{fla_conv.__name__}",
)
