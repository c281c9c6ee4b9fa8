"""Multi-head latent attention for the property checks."""

from __future__ import annotations

import torch

from perilune.kernels.common.cases import normal
from perilune.kernels.common.few_tokens import fp32_inference
from perilune.kernels.common.packing import Packing
from perilune.kernels.mla.paged import paged
from perilune.kernels.mla.prefill_lengths import is_long
from perilune.kernels.registry import Inputs
from perilune.kernels.traits import Traits

HEADS, MANY_HEADS, K3_HEADS, K3_WIDTH = 3, 70, 96, 576
LONG_SHARES = 65
"""So many sequences of K3's rows have long contexts, and query tokens that leave few programs for
each: on any GPU, a program's share of all contexts is then more than 64 tiles."""


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
    """Contexts about the ends of pages, none and full ones among them: other ones each time, in
    tables and pools of the same size."""
    n, full = sum(lengths), width >= 64
    page, pages = (64, 3) if full else (16, 2)
    queries, heads = 2 - n % 2, HEADS
    if width == K3_WIDTH and n == LONG_SHARES:
        pages, queries = 56, 16
    contexts = (1, page - 1, page, page + 1, 0, pages * page, 2 * page - 3)
    first = int(torch.randint(len(contexts), (), generator=generator))
    chosen = [contexts[(first + i) % len(contexts)] for i in range(n)]
    rows_RC = normal(generator, dtype, sum(chosen), width).detach()
    if width == K3_WIDTH:
        # On a GPU, other programs serve other numbers of heads; K3's see one and two queries, few
        # sequences and so many that a program's share of them is long.
        heads = MANY_HEADS if n % 5 == 2 else K3_HEADS
    return {
        "q_NQHC": normal(generator, dtype, n, queries, heads, width).detach(),
        **paged(generator, rows_RC, chosen, page, pages),
        "kv_lora_rank": width * 8 // 9,
        "scale": width**-0.5,
    }


def _library_trains(inputs: Inputs) -> bool:
    """cuDNN, in whose backward the order of sums is another one each time."""
    is_bf16 = inputs["q_THK"].dtype == torch.bfloat16
    return is_bf16 and is_long(inputs["packing"], inputs.get("keys"), trains=True)


def _cpu_serves(inputs: Inputs) -> bool:
    return fp32_inference(inputs["q_NQHC"]) and inputs["latent_PSC"].is_contiguous()


PREFILL = Traits(
    make=_make,
    tokens={"q_THK": 0, "k_SHN": 0, "shared_SR": 0, "v_SHV": 0},
    packing="packing",
    widths=(10,),
    full_widths=(192,),
    scaled=("q_THK", "v_SHV"),
    gradients_vary={"cuda": _library_trains},
)
DECODE = Traits(
    make=_make_cache,
    tokens={"q_NQHC": 0, "table_NW": 0, "length_N": 0},
    widths=(12,),
    full_widths=(K3_WIDTH, 560),
    scaled=("q_NQHC",),
    serves={"cpu": _cpu_serves},
    batch_invariant={"reference": 256, "cpu": 256},
    graphs=frozenset({"cuda"}),
)
