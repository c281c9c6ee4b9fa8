"""Sizes and least work of latent attention.

Prefill, causal: 2 H (L^2 / 2) (K + V) flops a sequence. Decode: the latents once, 2 H L (C + R)
flops for queries of C and values of R channels.
"""

from __future__ import annotations

import torch

from perilune.kernels.bench.cases import Bench, Case, Make, Work, drawn, num_bytes
from perilune.kernels.common.packing import Packing
from perilune.kernels.mla.bench_peers import FLASH_MLA
from perilune.kernels.registry import Inputs


def prefill(lengths: tuple[int, ...], heads: int, width: int, v_width: int) -> Make:
    def make(generator: torch.Generator, dtype: torch.dtype) -> Inputs:
        t = sum(lengths)
        return {
            "q_THK": drawn(generator, dtype, t, heads, width),
            "k_THK": drawn(generator, dtype, t, heads, width),
            "v_THV": drawn(generator, dtype, t, heads, v_width),
            "packing": Packing.of(lengths),
            "scale": width**-0.5,
        }

    return make


def decode(context: int, heads: int, width: int, rank: int) -> Make:
    def make(generator: torch.Generator, dtype: torch.dtype) -> Inputs:
        return {
            "q_HC": drawn(generator, dtype, heads, width),
            "latent_SC": drawn(generator, dtype, context, width),
            "kv_lora_rank": rank,
            "scale": width**-0.5,
        }

    return make


def prefill_work(inputs: Inputs, backward: bool) -> Work:
    q_THK, k_THK, v_THV = inputs["q_THK"], inputs["k_THK"], inputs["v_THV"]
    h, widths = q_THK.shape[1], q_THK.shape[2] + v_THV.shape[2]
    pairs = sum(length * length // 2 for length in inputs["packing"].lengths)
    return Work(num_bytes(q_THK, k_THK, v_THV, v_THV), 2 * h * pairs * widths)


def decode_work(inputs: Inputs, backward: bool) -> Work:
    q_HC, latent_SC = inputs["q_HC"], inputs["latent_SC"]
    channels = latent_SC.shape[1] + inputs["kv_lora_rank"]
    return Work(num_bytes(q_HC, latent_SC), 2 * q_HC.shape[0] * latent_SC.shape[0] * channels)


_GPU = {"device": "cuda", "dtype": torch.bfloat16}
_DECODE = {"device": "cuda", "dtype": torch.bfloat16, "peers": (FLASH_MLA,)}

BENCHES = {
    "mla_prefill": Bench(
        inside="causal attention, expanded heads",
        work=prefill_work,
        cases={
            "L128_H4": Case(make=prefill((128,), 4, 64, 32)),
            "L8192_H96": Case(make=prefill((8192,), 96, 192, 128), **_GPU),
        },
    ),
    "mla_decode": Bench(
        inside="scores, softmax and latents of one sequence",
        work=decode_work,
        cases={
            "L1024_H8": Case(make=decode(1024, 8, 144, 128)),
            "L8192_H96": Case(make=decode(8192, 96, 576, 512), graph=True, **_DECODE),
            "L131072_H96": Case(make=decode(131072, 96, 576, 512), graph=True, **_DECODE),
            "L1048576_H96": Case(make=decode(1048576, 96, 576, 512), **_DECODE),
        },
    ),
}
