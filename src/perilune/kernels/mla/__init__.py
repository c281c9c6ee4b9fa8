"""Multi-head latent attention: expanded prefill, absorbed decode."""

from __future__ import annotations

import torch

from perilune.kernels.common.cases import FP32, normal
from perilune.kernels.common.packing import Packing
from perilune.kernels.registry import Inputs, OpSpec


def _inputs(generator: torch.Generator, dtype: torch.dtype, lengths: tuple[int, ...]) -> Inputs:
    t, heads, k, v = sum(lengths), 3, 10, 6
    return {
        "q_THK": normal(generator, dtype, t, heads, k),
        "k_THK": normal(generator, dtype, t, heads, k),
        "v_THV": normal(generator, dtype, t, heads, v),
        "packing": Packing.of(lengths),
        "scale": k**-0.5,
    }


def _segmented(generator: torch.Generator, dtype: torch.dtype) -> Inputs:
    inputs = _inputs(generator, dtype, (6, 6))
    inputs["packing"] = Packing.rows(torch.tensor([[0, 0, 0, 1, 1, 2], [4, 4, 4, 4, 4, 4]]))
    return inputs


def _decode_inputs(generator: torch.Generator, dtype: torch.dtype, tokens: int) -> Inputs:
    return {
        "q_HC": normal(generator, dtype, 3, 12),
        "latent_SC": normal(generator, dtype, tokens, 12),
        "kv_lora_rank": 8,
        "scale": 0.3,
    }


def _beyond_exp(generator: torch.Generator, dtype: torch.dtype) -> Inputs:
    """Scores above 88. One token takes all, and the gradients are rounding alone: not asked for."""
    inputs = _decode_inputs(generator, dtype, 5)
    plain = {name: inputs[name].detach() for name in ("q_HC", "latent_SC")}
    return inputs | plain | {"scale": 40.0}


PREFILL = OpSpec(
    name="mla_prefill",
    signature="(q_THK, k_THK, v_THV, packing, scale) -> o_THV",
    reference="perilune.kernels.mla.reference:mla_prefill",
    oracle="perilune.kernels.mla.oracle:mla_prefill",
    cases={
        "one_token": lambda g, d: _inputs(g, d, (1,)),
        "empty_sequence": lambda g, d: _inputs(g, d, (0, 5, 0, 9, 0)),
        "odd_lengths": lambda g, d: _inputs(g, d, (5, 1, 9)),
        "segmented_rows": _segmented,
    },
    tolerance=FP32,
    traits="perilune.kernels.mla.traits:PREFILL",
)
DECODE = OpSpec(
    name="mla_decode",
    signature="(q_HC, latent_SC, kv_lora_rank, scale) -> o_HC",
    reference="perilune.kernels.mla.reference:mla_decode",
    backends={"cpu": "perilune.kernels.mla.cpu:mla_decode"},
    oracle="perilune.kernels.mla.oracle:mla_decode",
    cases={
        "one_row": lambda g, d: _decode_inputs(g, d, 1),
        "odd": lambda g, d: _decode_inputs(g, d, 37),
        "scores_beyond_exp": _beyond_exp,
    },
    tolerance=FP32,
    traits="perilune.kernels.mla.traits:DECODE",
)
