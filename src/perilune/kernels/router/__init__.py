"""Expert choice."""

from __future__ import annotations

import torch

from perilune.kernels.common.cases import EXACT_FP32, normal
from perilune.kernels.registry import Inputs, OpSpec


def _inputs(generator: torch.Generator, dtype: torch.dtype, experts: int, k: int) -> Inputs:
    return {
        "logits_TE": normal(generator, dtype, 7, experts),
        "bias_E": 0.3 * torch.randn(experts, generator=generator, dtype=dtype),
        "num_active": k,
        "renormalize": True,
        "scale": 2.446,
    }


def _vanishing(generator: torch.Generator, dtype: torch.dtype) -> Inputs:
    """Scores about as small as the eps of the renormalisation."""
    inputs = _inputs(generator, dtype, 6, 2)
    inputs["logits_TE"] = (inputs["logits_TE"].detach() - 46).requires_grad_()
    return inputs


def _tied(generator: torch.Generator, dtype: torch.dtype) -> Inputs:
    inputs = _inputs(generator, dtype, 8, 3)
    inputs["logits_TE"] = torch.zeros(7, 8, dtype=dtype).requires_grad_()
    inputs["bias_E"] = torch.zeros(8, dtype=dtype)
    return inputs


SPEC = OpSpec(
    name="router",
    signature="(logits_TE, bias_E, num_active, renormalize, scale)"
    " -> (expert_TR, weight_TR, score_TE)",
    reference="perilune.kernels.router.reference:route",
    backends={
        "cpu": "perilune.kernels.router.cpu:route",
        "cuda": "perilune.kernels.router.triton:route",
    },
    oracle="perilune.kernels.router.oracle:route",
    cases={
        "eight_three": lambda g, d: _inputs(g, d, 8, 3),
        "all_experts": lambda g, d: _inputs(g, d, 5, 5),
        "all_tied": _tied,
        "vanishing": _vanishing,
        "not_renormalised": lambda g, d: _inputs(g, d, 8, 3) | {"renormalize": False},
    },
    tolerance=EXACT_FP32,
    traits="perilune.kernels.router.traits:SPEC",
)
