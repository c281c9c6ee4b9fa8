"""RMSNorm, and KDA's gated output norm."""

from __future__ import annotations

from perilune.kernels.common.cases import BF16, EXACT_FP32, normal
from perilune.kernels.registry import OpSpec

RMS_NORM = OpSpec(
    name="rms_norm",
    signature="(x_D, weight_D, eps) -> y_D",
    reference="perilune.kernels.norm.reference:rms_norm",
    oracle="perilune.kernels.norm.oracle:rms_norm",
    backends={
        "cpu": "perilune.kernels.norm.cpu:rms_norm",
        "cuda": "perilune.kernels.norm.triton:rms_norm",
    },
    cases={
        "plain": lambda g, d: {
            "x_D": normal(g, d, 5, 7),
            "weight_D": normal(g, d, 7),
            "eps": 1e-5,
        },
        "as_small_as_eps": lambda g, d: {
            "x_D": normal(g, d, 5, 7, scale=1e-3),
            "weight_D": normal(g, d, 7),
            "eps": 1e-6,
        },
    },
    tolerance=EXACT_FP32,
    backend_tolerance={"cuda": EXACT_FP32 | BF16},
    traits="perilune.kernels.norm.traits:RMS_NORM",
)
GATED_RMS_NORM = OpSpec(
    name="gated_rms_norm",
    signature="(x_D, gate_D, weight_D, eps) -> y_D",
    reference="perilune.kernels.norm.reference:gated_rms_norm",
    oracle="perilune.kernels.norm.oracle:gated_rms_norm",
    backends={
        "cpu": "perilune.kernels.norm.cpu:gated_rms_norm",
        "cuda": "perilune.kernels.norm.triton:gated_rms_norm",
    },
    cases={
        "per_head": lambda g, d: {
            "x_D": normal(g, d, 3, 2, 9),
            "gate_D": normal(g, d, 3, 2, 9),
            "weight_D": normal(g, d, 9),
            "eps": 1e-5,
        },
        "as_small_as_eps": lambda g, d: {
            "x_D": normal(g, d, 3, 2, 9, scale=1e-3),
            "gate_D": normal(g, d, 3, 2, 9),
            "weight_D": normal(g, d, 9),
            "eps": 1e-6,
        },
    },
    tolerance=EXACT_FP32,
    backend_tolerance={"cuda": EXACT_FP32 | BF16},
    traits="perilune.kernels.norm.traits:GATED_RMS_NORM",
)
