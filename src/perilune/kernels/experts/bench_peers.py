"""torch's grouped products as a peer: over bf16 weights, dequantised beforehand."""

from __future__ import annotations

import torch
from torch import Tensor

from perilune.kernels.bench.cases import Bound, Peer
from perilune.kernels.experts import grouped
from perilune.kernels.experts.tiles import COLUMNS, ROWS, untiled, values
from perilune.kernels.registry import Inputs


def torch_grouped(inputs: Inputs, backward: bool) -> Bound:
    w13_E2IL, w2_ELI = dequantised(inputs)
    arguments = [inputs[name] for name in ("x_TL", "expert_TR", "weight_TR")]
    arguments += [w13_E2IL, w2_ELI, inputs["beta"], inputs["linear_beta"]]
    return Bound(lambda: grouped.experts(*arguments), lambda y_TL: [y_TL])


def dequantised(inputs: Inputs) -> tuple[Tensor, Tensor]:
    """w13 [E, 2I, L] and w2 [E, L, I] in bf16, made an expert at a time."""
    w13_EMKW, w2_EMKW = inputs["w13_EMKW"], inputs["w2_EMKW"]
    width = inputs["x_TL"].shape[1]
    rows, inner = w13_EMKW.shape[1] * ROWS, w2_EMKW.shape[2] * COLUMNS
    w13 = _bf16(w13_EMKW, rows, width, gated=True)
    return w13, _bf16(w2_EMKW, width, inner, gated=False)[..., : rows // 2]


def _bf16(tiles_EMKW: Tensor, rows: int, columns: int, *, gated: bool) -> Tensor:
    shape = (tiles_EMKW.shape[0], rows, columns)
    weights = torch.empty(shape, dtype=torch.bfloat16, device=tiles_EMKW.device)
    for expert, tiles_MKW in enumerate(tiles_EMKW):
        packed = untiled(tiles_MKW[None], rows, columns, gated=gated)
        weights[expert] = values(packed, torch.bfloat16)[0]
    return weights


TORCH = Peer(
    name="torch grouped_mm, bf16 weights",
    distribution="torch",
    module="torch",
    bind=f"{__name__}:{torch_grouped.__name__}",
)
