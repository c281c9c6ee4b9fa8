"""Sizes and least work of latent attention.

Prefill, causal: 2 H (L^2 / 2) (K + V) flops a sequence; backward has the scores again, and four
products more, 2 H (L^2 / 2) (3 K + 2 V). Decode: the latents once, 2 H L (C + R)
flops for queries of C and values of R channels.
"""

from __future__ import annotations

import torch
from torch import Tensor

from perilune.kernels.bench.cases import Bench, Case, Excerpt, Make, Work, drawn, num_bytes
from perilune.kernels.common.packing import Packing
from perilune.kernels.mla.bench_peers import FLASH_MLA, PAGE
from perilune.kernels.mla.paged import paged
from perilune.kernels.mla.prefill_peers import CUDNN, FLASH, FLASH_3
from perilune.kernels.registry import Inputs


def prefill(
    lengths: tuple[int, ...],
    heads: int,
    own: int,
    shared: int,
    v_width: int,
    *,
    in_front: int = 0,
) -> Make:
    """`in_front`: rows of keys and values before each sequence's own."""
    seen = tuple(length + in_front for length in lengths)

    def make(generator: torch.Generator, dtype: torch.dtype) -> Inputs:
        t, s = sum(lengths), sum(seen)
        kv_SHX = drawn(generator, dtype, s, heads, own + v_width)
        return {
            "q_THK": drawn(generator, dtype, t, heads, own + shared),
            "k_SHN": kv_SHX[..., :own],
            "shared_SR": drawn(generator, dtype, s, shared),
            "v_SHV": kv_SHX[..., own:],
            "packing": Packing.of(lengths),
            "scale": (own + shared) ** -0.5,
            "keys": Packing.of(seen) if in_front else None,
        }

    return make


def decode(contexts: tuple[int, ...], heads: int, width: int, rank: int, queries: int = 1) -> Make:
    """Pages in no order. Nobody's rows are zeros: new values are old ones that move on."""

    def make(generator: torch.Generator, dtype: torch.dtype) -> Inputs:
        rows_RC = drawn(generator, dtype, sum(contexts), width)
        cached = paged(generator, rows_RC, contexts, PAGE)
        cached["latent_PSC"].nan_to_num_()
        return {
            "q_NQHC": drawn(generator, dtype, len(contexts), queries, heads, width),
            **cached,
            "kv_lora_rank": rank,
            "scale": width**-0.5,
        }

    return make


EXCERPT_HEADS = (0, 31, 64, 95)


def some_heads(inputs: Inputs) -> Inputs:
    """All queries and keys of a few heads: the reference of all would take seconds."""
    heads = list(EXCERPT_HEADS)
    return inputs | {name: inputs[name][:, heads] for name in ("q_THK", "k_SHN", "v_SHV")}


def some_heads_of_results(results: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name: x[:, list(EXCERPT_HEADS)] for name, x in results.items()}


FEW_HEADS = Excerpt(
    inputs=some_heads,
    results=some_heads_of_results,
    said=f"errors of heads {', '.join(map(str, EXCERPT_HEADS))}",
)


def prefill_work(inputs: Inputs, backward: bool) -> Work:
    q_THK, v_SHV, packing = inputs["q_THK"], inputs["v_SHV"], inputs["packing"]
    keys = packing if inputs["keys"] is None else inputs["keys"]
    lengths = zip(packing.lengths, keys.lengths, strict=True)
    pairs = sum(t * (s - t) + t * t // 2 for t, s in lengths)
    operands = num_bytes(q_THK, inputs["k_SHN"], inputs["shared_SR"], v_SHV)
    h, k, v = q_THK.shape[1], q_THK.shape[2], v_SHV.shape[2]
    o_bytes = q_THK.shape[0] * h * v * q_THK.element_size()
    forward = Work(operands + o_bytes, 2 * h * pairs * (k + v))
    if not backward:
        return forward
    return Work(
        forward.bytes + 2 * operands + 2 * o_bytes, forward.flops + 2 * h * pairs * (3 * k + 2 * v)
    )


def decode_work(inputs: Inputs, backward: bool) -> Work:
    q_NQHC, rank = inputs["q_NQHC"], inputs["kv_lora_rank"]
    n, q, h, width = q_NQHC.shape
    rows = int(inputs["length_N"].sum())
    cached = [inputs.get(name) for name in ("latent_PSC", "shared_PSR", "rate_PS")]
    row_bytes = num_bytes(*(x[0, :1] for x in cached if x is not None))
    o_bytes = n * q * h * rank * q_NQHC.element_size()
    channels = width + rank
    return Work(num_bytes(q_NQHC) + rows * row_bytes + o_bytes, 2 * q * h * rows * channels)


K3 = (96, 128, 64, 128)
"""Heads, own and shared key channels, value width."""
K3_LATENT = (96, 576, 512)
"""Heads, channels of a cached row, of them the latent's."""
MIXED_CONTEXTS = (131072, 700, 35000, 1, 9001, 64000)
MIXED = (1300, 547, 2048, 963, 271, 3063)

_GPU = {"device": "cuda", "dtype": torch.bfloat16}
_PREFILL = {"device": "cuda", "dtype": torch.bfloat16, "peers": (CUDNN, FLASH, FLASH_3)}
_DECODE = {"device": "cuda", "dtype": torch.bfloat16, "graph": True, "peers": (FLASH_MLA,)}

BENCHES = {
    "mla_prefill": Bench(
        inside="causal attention; shared key channels brought to the heads",
        work=prefill_work,
        cases={
            "L128_H4": Case(make=prefill((128,), 4, 48, 16, 32)),
            "L8192_H96": Case(make=prefill((8192,), *K3), **_PREFILL),
            "8x1024_H96": Case(make=prefill((1024,) * 8, *K3), **_PREFILL),
            "mixed_H96": Case(make=prefill(MIXED, *K3), **_PREFILL),
            "L8192_in_front_24576_H96": Case(make=prefill((8192,), *K3, in_front=24576), **_GPU),
            "L65536_H96": Case(make=prefill((65536,), *K3), excerpt=FEW_HEADS, **_PREFILL),
            "L8192_H96_backward": Case(make=prefill((8192,), *K3), backward=True, **_PREFILL),
            "mixed_H96_backward": Case(make=prefill(MIXED, *K3), backward=True, **_PREFILL),
        },
    ),
    "mla_decode": Bench(
        inside="scores, softmax and latents of all sequences, merge of parts",
        work=decode_work,
        cases={
            "L1024_H8": Case(make=decode((1024,), 8, 144, 128)),
            "N1_L8192_H96": Case(make=decode((8192,), *K3_LATENT), **_DECODE),
            "N32_L8192_H96": Case(make=decode((8192,) * 32, *K3_LATENT), **_DECODE),
            "N1_L131072_H96": Case(make=decode((131072,), *K3_LATENT), **_DECODE),
            "N8_L131072_H96": Case(make=decode((131072,) * 8, *K3_LATENT), **_DECODE),
            "N1_L1048576_H96": Case(make=decode((1048576,), *K3_LATENT), **_DECODE),
            "N128_L4096_H96": Case(make=decode((4096,) * 128, *K3_LATENT), **_DECODE),
            "N6_mixed_H96": Case(make=decode(MIXED_CONTEXTS, *K3_LATENT), **_DECODE),
            "N32_L8192_Q4_H96": Case(make=decode((8192,) * 32, *K3_LATENT, queries=4), **_DECODE),
            "N32_L8192_H12": Case(make=decode((8192,) * 32, 12, 576, 512), **_DECODE),
        },
    ),
}
