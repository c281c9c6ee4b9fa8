"""SiTU-GLU and SwiGLU."""

from __future__ import annotations

from perilune.kernels.common.cases import BF16, EXACT_FP32, normal
from perilune.kernels.registry import OpSpec

SPEC = OpSpec(
    name="situ",
    signature="(gate_up_2I, beta, linear_beta) -> y_I",
    reference="perilune.kernels.situ.reference:situ_glu",
    oracle="perilune.kernels.situ.oracle:situ_glu",
    backends={
        "cpu": "perilune.kernels.situ.cpu:situ_glu",
        "cuda": "perilune.kernels.situ.triton:situ_glu",
    },
    cases={
        "small": lambda g, d: {
            "gate_up_2I": normal(g, d, 4, 10),
            "beta": 4.0,
            "linear_beta": 25.0,
        },
        "saturated": lambda g, d: {
            "gate_up_2I": normal(g, d, 4, 10, scale=60.0),
            "beta": 4.0,
            "linear_beta": 25.0,
        },
        "uncapped_up": lambda g, d: {
            "gate_up_2I": normal(g, d, 4, 10, scale=9.0),
            "beta": 4.0,
            "linear_beta": None,
        },
        "swi_glu": lambda g, d: {
            "gate_up_2I": normal(g, d, 4, 10, scale=9.0),
            "beta": None,
            "linear_beta": None,
        },
    },
    tolerance=EXACT_FP32,
    backend_tolerance={"cuda": EXACT_FP32 | BF16},
    traits="perilune.kernels.situ.traits:SPEC",
)
