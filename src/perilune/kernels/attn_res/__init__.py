"""Attention over residual sources."""

from __future__ import annotations

from perilune.kernels.common.cases import BF16, FP32, normal
from perilune.kernels.registry import OpSpec

SPEC = OpSpec(
    name="attn_res",
    signature="(sources_NTD, query_D, eps) -> h_TD",
    reference="perilune.kernels.attn_res.reference:attn_res",
    oracle="perilune.kernels.attn_res.oracle:attn_res",
    backends={
        "cpu": "perilune.kernels.attn_res.cpu:attn_res",
        "cuda": "perilune.kernels.attn_res.triton:attn_res",
    },
    cases={
        "nine_sources": lambda g, d: {
            "sources_NTD": normal(g, d, 9, 3, 17),
            "query_D": normal(g, d, 17),
            "eps": 1e-5,
        },
        "one_source": lambda g, d: {
            "sources_NTD": normal(g, d, 1, 3, 17),
            "query_D": normal(g, d, 17),
            "eps": 1e-5,
        },
        # Scores above 88: one source takes all, and the gradients would be rounding alone.
        "scores_beyond_exp": lambda g, d: {
            "sources_NTD": normal(g, d, 4, 3, 17).detach(),
            "query_D": normal(g, d, 17, scale=40.0).detach(),
            "eps": 1e-5,
        },
        "as_small_as_eps": lambda g, d: {
            "sources_NTD": normal(g, d, 4, 3, 17, scale=1e-3),
            "query_D": normal(g, d, 17),
            "eps": 1e-5,
        },
    },
    tolerance=FP32,
    backend_tolerance={"cuda": FP32 | BF16},
    traits="perilune.kernels.attn_res.traits:SPEC",
)
