"""Multi-head latent attention: expanded prefill, absorbed decode."""

from __future__ import annotations

import math

import torch

from perilune.kernels.common.cases import BF16, FP32, normal
from perilune.kernels.common.packing import Packing
from perilune.kernels.mla.paged import paged, rounded
from perilune.kernels.registry import Inputs, OpSpec


def _inputs(
    generator: torch.Generator,
    dtype: torch.dtype,
    lengths: tuple[int, ...],
    *,
    keys: tuple[int, ...] | None = None,
    own: int = 7,
) -> Inputs:
    heads, shared, v = 3, 3, 6
    t, s = sum(lengths), sum(lengths if keys is None else keys)
    inputs = {
        "q_THK": normal(generator, dtype, t, heads, own + shared),
        "k_SHN": normal(generator, dtype, s, heads, own),
        "shared_SR": normal(generator, dtype, s, shared),
        "v_SHV": normal(generator, dtype, s, heads, v),
        "packing": Packing.of(lengths),
        "scale": (own + shared) ** -0.5,
    }
    return inputs if keys is None else inputs | {"keys": Packing.of(keys)}


def _segmented(
    generator: torch.Generator, dtype: torch.dtype, documents: tuple[tuple[int, ...], ...]
) -> Inputs:
    """Rows of documents of these lengths."""
    rows = [torch.arange(len(row)).repeat_interleave(torch.tensor(row)) for row in documents]
    packing = Packing.rows(torch.stack(rows))
    return _inputs(generator, dtype, packing.lengths) | {"packing": packing}


def _decode_inputs(
    generator: torch.Generator,
    dtype: torch.dtype,
    lengths: tuple[int, ...],
    *,
    queries: int = 1,
    heads: int = 3,
    rank: int = 8,
    shared: int = 4,
    page: int = 16,
) -> Inputs:
    rows_RC = normal(generator, dtype, sum(lengths), rank + shared).detach()
    cached = paged(generator, rows_RC, lengths, page)
    cached["latent_PSC"].requires_grad_()
    return {
        "q_NQHC": normal(generator, dtype, len(lengths), queries, heads, rank + shared),
        **cached,
        "kv_lora_rank": rank,
        "scale": 0.3,
    }


def _plain(inputs: Inputs) -> Inputs:
    """No gradient is asked for: then a backend without one serves."""
    return inputs | {name: inputs[name].detach() for name in ("q_NQHC", "latent_PSC")}


def _padded(generator: torch.Generator, dtype: torch.dtype) -> Inputs:
    """Rows that a batch is filled up with: no token, or no page."""
    inputs = _plain(_decode_inputs(generator, dtype, (0, 20, 17, 3), queries=2))
    inputs["table_NW"][2] = -1
    inputs["table_NW"][0] = -1
    return inputs


def _beyond_exp(generator: torch.Generator, dtype: torch.dtype) -> Inputs:
    """Scores above 88. One token takes all, and the gradients are rounding alone."""
    return _plain(_decode_inputs(generator, dtype, (5,))) | {"scale": 40.0}


def _rising(generator: torch.Generator, dtype: torch.dtype) -> Inputs:
    """Every tile of tokens has a higher score than the tiles before, and scores are negative."""
    inputs = _plain(_decode_inputs(generator, dtype, (130,), rank=16, shared=16))
    steps_S1 = torch.linspace(-3.0, -0.1, 130, dtype=dtype)[:, None]
    rows_SC = steps_S1 + 0.05 * torch.randn(130, 32, generator=generator, dtype=dtype)
    return (
        inputs
        | paged(generator, rows_SC, (130,), 16)
        | {"q_NQHC": torch.ones_like(inputs["q_NQHC"])}
    )


def _k3(
    generator: torch.Generator, dtype: torch.dtype, lengths: tuple[int, ...], queries: int = 1
) -> Inputs:
    """K3's rows. For all of its heads there are other programs, in bf16 alone: few are quick, and
    one query token."""
    heads, queries = (96, queries) if dtype == torch.bfloat16 else (3, 1)
    shape = {"queries": queries, "heads": heads, "rank": 512, "shared": 64, "page": 64}
    return _plain(_decode_inputs(generator, dtype, lengths, **shape)) | {"scale": 576**-0.5}


def _k3_far_apart(generator: torch.Generator, dtype: torch.dtype) -> Inputs:
    """Scores of two tiles are higher than 2^64 times those before, and a page is missing."""
    inputs = _k3(generator, dtype, (290,))
    for page, factor in ((1, 40.0), (3, 90.0)):
        inputs["latent_PSC"][inputs["table_NW"][0, page]] *= factor
    inputs["table_NW"][0, 2] = -1
    return inputs


WHOLE = 67
"""Query tokens of which no GPU has two programs for each: one of them has the whole context."""


def _k3_holes(generator: torch.Generator, dtype: torch.dtype) -> Inputs:
    """Pages are missing between and before others that weigh as much, and all of one sequence."""
    inputs = _k3(generator, dtype, (150, 70, 64), WHOLE)
    for n, page in ((0, 1), (1, 0), (2, 0)):
        inputs["table_NW"][n, page] = -1
    return inputs


K3_RISES = (-136.0, 0.0, 0.0, -70.0, 136.0)
"""Of the pages of `k3_rises`: logarithms to base 2 of what their scores are raised by."""


def _k3_rises(generator: torch.Generator, dtype: torch.dtype) -> Inputs:
    """Of every other head, later pages weigh more than fp32 can tell; one is missing.

    Only a shared channel raises scores, so that outputs are as large whatever weighs most."""
    inputs = _k3(generator, dtype, (290,), WHOLE)
    inputs["q_NQHC"][..., -1] = 0
    inputs["q_NQHC"][..., ::2, -1] = 1 / inputs["scale"]
    for page, rise in zip(inputs["table_NW"][0], K3_RISES, strict=True):
        inputs["latent_PSC"][page, :, -1] = rise * math.log(2)
    inputs["table_NW"][0, 2] = -1
    return inputs


def _rounded(generator: torch.Generator, dtype: torch.dtype) -> Inputs:
    inputs = _plain(_decode_inputs(generator, dtype, (37, 50), queries=2, rank=32, shared=16))
    return inputs | rounded(inputs["latent_PSC"], 32)


PREFILL = OpSpec(
    name="mla_prefill",
    signature="(q_THK, k_SHN, shared_SR, v_SHV, packing, scale, keys) -> o_THV",
    reference="perilune.kernels.mla.reference:mla_prefill",
    oracle="perilune.kernels.mla.oracle:mla_prefill",
    backends={"cuda": "perilune.kernels.mla.triton_prefill:mla_prefill"},
    cases={
        "one_token": lambda g, d: _inputs(g, d, (1,)),
        "empty_sequence": lambda g, d: _inputs(g, d, (0, 5, 0, 9, 0)),
        "odd_lengths": lambda g, d: _inputs(g, d, (5, 1, 9)),
        "segmented_rows": lambda g, d: _segmented(g, d, ((3, 2, 1), (6,))),
        "beyond_a_tile": lambda g, d: _inputs(g, d, (40, 33)),
        "cached_in_front": lambda g, d: _inputs(g, d, (3, 34, 0, 1), keys=(3, 70, 5, 34)),
        "long_documents": lambda g, d: _segmented(g, d, ((5, 34, 1), (40,))),
        "scores_beyond_exp": lambda g, d: _inputs(g, d, (40,)) | {"scale": 10.0},
    },
    tolerance=FP32,
    backend_tolerance={"cuda": FP32 | BF16},
    traits="perilune.kernels.mla.traits:PREFILL",
)
DECODE = OpSpec(
    name="mla_decode",
    signature="(q_NQHC, latent_PSC, table_NW, length_N, kv_lora_rank, scale, shared_PSR, rate_PS)"
    " -> o_NQHC",
    reference="perilune.kernels.mla.reference:mla_decode",
    backends={
        "cpu": "perilune.kernels.mla.cpu:mla_decode",
        "cuda": "perilune.kernels.mla.triton:mla_decode",
    },
    oracle="perilune.kernels.mla.oracle:mla_decode",
    cases={
        "one_row": lambda g, d: _decode_inputs(g, d, (1,)),
        "odd": lambda g, d: _decode_inputs(g, d, (37,)),
        "one_page": lambda g, d: _decode_inputs(g, d, (37,), page=50),
        "page_ends": lambda g, d: _decode_inputs(g, d, (15, 16, 17, 1, 0, 33), queries=2),
        "scores_beyond_exp": _beyond_exp,
        "one_row_plain": lambda g, d: _plain(_decode_inputs(g, d, (1,))),
        "odd_plain": lambda g, d: _plain(_decode_inputs(g, d, (37,))),
        "one_page_plain": lambda g, d: _plain(_decode_inputs(g, d, (37,), page=50)),
        "page_ends_plain": lambda g, d: _plain(_decode_inputs(g, d, (15, 16, 17, 1, 0, 33))),
        "odd_pages": lambda g, d: _plain(_decode_inputs(g, d, (37, 11), page=5, queries=3)),
        "many_queries": lambda g, d: _plain(_decode_inputs(g, d, (2, 9), queries=8)),
        "padded": _padded,
        "many_heads": lambda g, d: _plain(
            _decode_inputs(g, d, (30, 20), heads=70, rank=6, shared=3)
        ),
        "k3_heads": lambda g, d: _plain(
            _decode_inputs(g, d, (70,), heads=96, rank=32, shared=16, page=64)
        ),
        "k3_rows": lambda g, d: _k3(g, d, (70, 0, 1, 129)),
        "k3_far_apart": _k3_far_apart,
        "rising_scores": _rising,
        "rounded": _rounded,
        "k3_holes": _k3_holes,
        "k3_rises": _k3_rises,
    },
    tolerance=FP32,
    backend_tolerance={"cuda": FP32 | BF16},
    traits="perilune.kernels.mla.traits:DECODE",
)
