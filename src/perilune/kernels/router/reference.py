"""Expert choice: sigmoid scores, a bias that only selects (Kimi K3 report, Eq. 11).

Legend: T tokens, E experts, R experts a token, B bins of a histogram.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from perilune.kernels.router.tally import Tally, add


class Routes(NamedTuple):
    expert_TR: Tensor
    """int64 expert indices, best biased score first; ties go to the lower index."""
    weight_TR: Tensor
    """fp32 mixing weights, from the unbiased scores."""


def route(
    logits_TE: Tensor,
    bias_E: Tensor,
    num_active: int,
    renormalize: bool,
    scale: float,
    count_EB: Tensor | None = None,
    load_E: Tensor | None = None,
    is_counted_T: Tensor | None = None,
) -> Routes:
    """Top `num_active` of sigmoid(logits) + bias; weights s / (sum s + 1e-20) * scale.

    The last three are the counters of a `Tally`, to which the choice adds; there have to be more
    experts than a token has, then.
    """
    score_TE = torch.sigmoid(logits_TE.to(torch.promote_types(torch.float32, logits_TE.dtype)))
    best = torch.sort(score_TE.detach() + bias_E, dim=-1, descending=True, stable=True)
    expert_TR = best.indices[:, :num_active]
    weight_TR = score_TE.gather(-1, expert_TR)
    if renormalize:
        weight_TR = weight_TR / (weight_TR.sum(-1, keepdim=True) + 1e-20)
    if count_EB is not None and load_E is not None:
        tally = Tally(count_EB, load_E, is_counted_T)
        add(tally, score_TE.detach(), best.values[:, num_active], expert_TR, bias_E)
    return Routes(expert_TR, weight_TR * scale)
