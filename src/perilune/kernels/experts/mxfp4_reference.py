"""The routed expert MLPs from packed MXFP4: dequantised, then as those of any weights.

Legend: T tokens, R experts a token, E experts, L expert input width, I intermediate width; MKW
tiles as in `tiles`.
"""

from __future__ import annotations

from torch import Tensor

from perilune.kernels.experts import reference
from perilune.kernels.experts.tiles import COLUMNS, untiled, values


def experts_mxfp4(
    x_TL: Tensor,
    expert_TR: Tensor,
    weight_TR: Tensor,
    w13_EMKW: Tensor,
    w2_EMKW: Tensor,
    wide: bool,
    beta: float | None,
    linear_beta: float | None,
) -> Tensor:
    """As `reference.experts`, of the weights that `tiles.tiled` packed; gradients of x and weights.

    `wide` says whether a scale is above 2 or NaN (`tiles.is_wide`); False is a promise.
    """
    width = x_TL.shape[1]
    inner = w2_EMKW.shape[2] * COLUMNS
    rows = untiled(w13_EMKW, w13_EMKW.shape[1] * 64, -(-width // 32) * 32, gated=True)
    w13_E2IL = values(rows, x_TL.dtype)[..., :width]
    w2_ELI = values(untiled(w2_EMKW, width, inner, gated=False), x_TL.dtype)
    w2_ELI = w2_ELI[..., : w13_E2IL.shape[1] // 2]
    return reference.experts(x_TL, expert_TR, weight_TR, w13_E2IL, w2_ELI, beta, linear_beta)
