"""Multi-head latent attention: expanded prefill, absorbed decode."""

from __future__ import annotations

import torch

from perilune.kernels.common.cases import BF16, FP32, normal
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


def _decode_inputs(
    generator: torch.Generator,
    dtype: torch.dtype,
    tokens: int,
    *,
    heads: int = 3,
    rank: int = 8,
    shared: int = 4,
) -> Inputs:
    return {
        "q_HC": normal(generator, dtype, heads, rank + shared),
        "latent_SC": normal(generator, dtype, tokens, rank + shared),
        "kv_lora_rank": rank,
        "scale": 0.3,
    }


def _plain(inputs: Inputs) -> Inputs:
    """No gradient is asked for: then a backend without one serves."""
    return inputs | {name: inputs[name].detach() for name in ("q_HC", "latent_SC")}


def _beyond_exp(generator: torch.Generator, dtype: torch.dtype) -> Inputs:
    """Scores above 88. One token takes all, and the gradients are rounding alone."""
    return _plain(_decode_inputs(generator, dtype, 5)) | {"scale": 40.0}


def _rising(generator: torch.Generator, dtype: torch.dtype) -> Inputs:
    """Every tile of tokens has a higher score than the tiles before, and scores are negative."""
    inputs = _plain(_decode_inputs(generator, dtype, 130, rank=16, shared=16))
    steps_S1 = torch.linspace(-3.0, -0.1, 130, dtype=dtype)[:, None]
    return inputs | {
        "q_HC": torch.ones_like(inputs["q_HC"]),
        "latent_SC": steps_S1 + 0.05 * inputs["latent_SC"],
    }


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
    backends={
        "cpu": "perilune.kernels.mla.cpu:mla_decode",
        "cuda": "perilune.kernels.mla.triton:mla_decode",
    },
    oracle="perilune.kernels.mla.oracle:mla_decode",
    cases={
        "one_row": lambda g, d: _decode_inputs(g, d, 1),
        "odd": lambda g, d: _decode_inputs(g, d, 37),
        "scores_beyond_exp": _beyond_exp,
        "one_row_plain": lambda g, d: _plain(_decode_inputs(g, d, 1)),
        "odd_plain": lambda g, d: _plain(_decode_inputs(g, d, 37)),
        "many_heads": lambda g, d: _plain(_decode_inputs(g, d, 70, heads=70, rank=6, shared=3)),
        "rising_scores": _rising,
    },
    tolerance=FP32,
    backend_tolerance={"cuda": FP32 | BF16},
    traits="perilune.kernels.mla.traits:DECODE",
)
