"""Multi-head latent attention for the property checks."""

from __future__ import annotations

import torch

from perilune.kernels.common.cases import normal
from perilune.kernels.common.few_tokens import few_tokens
from perilune.kernels.common.packing import Packing
from perilune.kernels.registry import Inputs
from perilune.kernels.traits import Traits

HEADS = 3


def _make(
    generator: torch.Generator, dtype: torch.dtype, lengths: tuple[int, ...], width: int
) -> Inputs:
    t, shared = sum(lengths), width // 3
    own = width - shared
    return {
        "q_THK": normal(generator, dtype, t, HEADS, width),
        "k_SHN": normal(generator, dtype, t, HEADS, own),
        "shared_SR": normal(generator, dtype, t, shared),
        "v_SHV": normal(generator, dtype, t, HEADS, own),
        "packing": Packing.of(lengths),
        "scale": width**-0.5,
    }


def _make_cache(
    generator: torch.Generator, dtype: torch.dtype, lengths: tuple[int, ...], width: int
) -> Inputs:
    return {
        "q_HC": normal(generator, dtype, HEADS, width),
        "latent_SC": normal(generator, dtype, sum(lengths), width),
        "kv_lora_rank": width * 8 // 9,
        "scale": width**-0.5,
    }


def _cpu_serves(inputs: Inputs) -> bool:
    return few_tokens(inputs["q_HC"][:1]) and inputs["latent_SC"].is_contiguous()


def _cuda_serves(inputs: Inputs) -> bool:
    return not (torch.is_grad_enabled() and inputs["q_HC"].requires_grad)


PREFILL = Traits(
    make=_make,
    tokens={"q_THK": 0, "k_SHN": 0, "shared_SR": 0, "v_SHV": 0},
    packing="packing",
    widths=(10,),
    full_widths=(192,),
    scaled=("q_THK", "v_SHV"),
)
DECODE = Traits(
    make=_make_cache,
    token_outputs={},
    widths=(12,),
    full_widths=(576,),
    scaled=("q_HC",),
    serves={"cpu": _cpu_serves, "cuda": _cuda_serves},
    graphs=frozenset({"cuda"}),
)
