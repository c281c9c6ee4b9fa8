"""Attention over residual sources."""

from __future__ import annotations

from collections.abc import Callable

import torch

from perilune.kernels.common.cases import BF16, FP32, normal
from perilune.kernels.registry import Inputs, OpSpec

Make = Callable[[torch.Generator, torch.dtype], Inputs]


def _sources(blocks: int, scale: float = 1.0, *, update: bool = False, norm: bool = False) -> Make:
    def make(g: torch.Generator, d: torch.dtype) -> Inputs:
        inputs: Inputs = {
            "partial_TD": normal(g, d, 3, 17, scale=scale),
            # No gradient of nothing.
            "blocks_NTD": normal(g, d, blocks, 3, 17, scale=scale).requires_grad_(blocks > 0),
            "query_D": normal(g, d, 17),
            "eps": 1e-5,
        }
        if update:
            inputs["update_TD"] = normal(g, d, 3, 17, scale=scale)
        if norm:
            inputs |= {"weight_D": normal(g, d, 17), "norm_eps": 1e-6}
        return inputs

    return make


def _beyond_exp(g: torch.Generator, d: torch.dtype) -> Inputs:
    """Scores above 88: one source takes all, and the gradients would be rounding alone."""
    query_D = normal(g, d, 17, scale=40.0)
    inputs = _sources(3)(g, d) | {"query_D": query_D}
    return {k: x.detach() if isinstance(x, torch.Tensor) else x for k, x in inputs.items()}


SPEC = OpSpec(
    name="attn_res",
    signature="(partial_TD, blocks_NTD, query_D, eps, update_TD, weight_D, norm_eps)"
    " -> (h_TD, partial_TD)",
    reference="perilune.kernels.attn_res.reference:attn_res",
    oracle="perilune.kernels.attn_res.oracle:attn_res",
    backends={
        "cpu": "perilune.kernels.attn_res.cpu:attn_res",
        "cuda": "perilune.kernels.attn_res.triton:attn_res",
    },
    cases={
        "nine_sources": _sources(8),
        "one_source": _sources(0, norm=True),
        "updated": _sources(3, update=True),
        "normed": _sources(4, norm=True),
        "updated_and_normed": _sources(8, update=True, norm=True),
        "scores_beyond_exp": _beyond_exp,
        "as_small_as_eps": _sources(3, 1e-3, update=True, norm=True),
    },
    tolerance=FP32,
    backend_tolerance={"cuda": FP32 | BF16},
    traits="perilune.kernels.attn_res.traits:SPEC",
)
