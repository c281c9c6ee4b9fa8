"""Expert choice, and the permutation that groups what was chosen by expert."""

from __future__ import annotations

import torch

from perilune.kernels.common.cases import EXACT_FP32, normal
from perilune.kernels.registry import Inputs, OpSpec, Tolerance


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


def _tallied(generator: torch.Generator, dtype: torch.dtype) -> Inputs:
    """Counters that are not empty, and tokens that are padding."""
    inputs = _inputs(generator, dtype, 8, 3)
    return inputs | {
        "count_EB": torch.randint(9, (8, 20), generator=generator, dtype=torch.int32),
        "load_E": torch.arange(8, dtype=torch.int32),
        "is_counted_T": torch.arange(7) % 3 > 0,
    }


def _pairs(
    generator: torch.Generator, dtype: torch.dtype, tokens: int, experts: int, active: int
) -> Inputs:
    order_TE = torch.rand(tokens, experts, generator=generator).argsort(1)
    return {"expert_TR": order_TE[:, :active].to(dtype), "num_experts": experts}


def _one_for_all(generator: torch.Generator, dtype: torch.dtype) -> Inputs:
    expert_TR = torch.tensor([[5, 2]], dtype=dtype).repeat(70, 1)
    return {"expert_TR": expert_TR, "num_experts": 7}


def _nobodys(generator: torch.Generator, dtype: torch.dtype) -> Inputs:
    """Half of the experts are elsewhere."""
    inputs = _pairs(generator, dtype, 40, 6, 3)
    inputs["expert_TR"][inputs["expert_TR"] >= 3] = -1
    return inputs


ROUTER = OpSpec(
    name="router",
    signature="(logits_TE, bias_E, num_active, renormalize, scale, count_EB!, load_E!,"
    " is_counted_T) -> (expert_TR, weight_TR)",
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
        "tallied": _tallied,
    },
    tolerance=EXACT_FP32,
    traits="perilune.kernels.router.traits:ROUTER",
)
PERMUTE = OpSpec(
    name="permute",
    signature="(expert_TR, num_experts) -> (start_E, pair_P, place_TR)",
    reference="perilune.kernels.router.permutation:permute",
    backends={"cuda": "perilune.kernels.router.triton:permute"},
    oracle="perilune.kernels.router.oracle:permute",
    cases={
        "spread": lambda g, d: _pairs(g, d, 40, 6, 3),
        "one_token": lambda g, d: _pairs(g, d, 1, 7, 4),
        "one_expert": lambda g, d: _pairs(g, d, 35, 1, 1),
        "one_for_all": _one_for_all,
        "nobodys": _nobodys,
        "blocks": lambda g, d: _pairs(g, d, 300, 11, 3),
    },
    tolerance=dict.fromkeys((torch.int64, torch.int32), Tolerance(forward=0.0, backward=0.0)),
    traits="perilune.kernels.router.traits:PERMUTE",
)
