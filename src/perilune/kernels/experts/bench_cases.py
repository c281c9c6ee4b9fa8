"""Sizes and least work of the routed experts: the weights of those that are touched, once.

K3's layer has 896 experts, of which a token uses 16; a GPU of eight has 112, and two of a token.
The weights of a layer in MXFP4 (15.7 GB, and 59 GB as the bf16 of a peer) are there once, shared by
all batches that are rotated: each goes to other experts.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from perilune.kernels.bench.cases import Bench, Case, Excerpt, Make, Work, drawn, num_bytes
from perilune.kernels.experts.bench_peers import HUMMING, TORCH
from perilune.kernels.experts.tiles import COLUMNS, PAD_ROWS, ROWS, SCALE_WORDS, WORDS
from perilune.kernels.registry import Inputs


def routed(tokens: int, experts: int, active: int, width: int, inner: int) -> Make:
    """Each token goes to other experts; the weights are held as bf16."""

    def make(generator: torch.Generator, dtype: torch.dtype) -> Inputs:
        device = generator.device
        scores = torch.rand(tokens, experts, generator=generator, device=device)
        return {
            "x_TL": drawn(generator, dtype, tokens, width),
            "expert_TR": scores.argsort(1)[:, :active].contiguous(),
            "weight_TR": drawn(generator, dtype, tokens, active),
            "w13_E2IL": drawn(generator, torch.bfloat16, experts, 2 * inner, width, scale=0.02),
            "w2_ELI": drawn(generator, torch.bfloat16, experts, width, inner, scale=0.02),
            "beta": 4.0,
            "linear_beta": 25.0,
        }

    return make


def work(inputs: Inputs, backward: bool) -> Work:
    x_TL, w13_E2IL, w2_ELI = inputs["x_TL"], inputs["w13_E2IL"], inputs["w2_ELI"]
    touched, rows = touched_and_rows(inputs)
    one_expert, (width, inner) = num_bytes(w13_E2IL[0], w2_ELI[0]), w2_ELI.shape[1:]
    # Backward: the weights once more, their gradients, and two products for each of the first.
    times = 3 if backward else 1
    size = touched * one_expert + 2 * num_bytes(x_TL)
    return Work(times * size, times * 2 * rows * 3 * width * inner)


def batches(tokens: int, experts: int, active: int, width: int) -> Make:
    """Tokens, each of which goes to other experts; the mixing weights are fp32."""

    def make(generator: torch.Generator, dtype: torch.dtype) -> Inputs:
        scores = torch.rand(tokens, experts, generator=generator, device=generator.device)
        return {
            "x_TL": drawn(generator, dtype, tokens, width),
            "expert_TR": scores.argsort(1)[:, :active].contiguous(),
            "weight_TR": drawn(generator, torch.float32, tokens, active),
            "beta": 4.0,
            "linear_beta": 25.0,
        }

    return make


def weights(experts: int, width: int, inner: int) -> Make:
    """In MXFP4: any codes, and scales of three sizes that leave outputs moderate."""

    def tiles(generator: torch.Generator, rows: int, columns: int) -> Tensor:
        shape = (experts, -(-rows // PAD_ROWS) * 2, -(-columns // COLUMNS))
        on_device = {"generator": generator, "device": generator.device, "dtype": torch.int32}
        words = torch.randint(-(2**31), 2**31, (*shape, WORDS + SCALE_WORDS), **on_device)
        small = torch.randint(0, 2, (*shape, SCALE_WORDS), **on_device)
        words[..., WORDS:] = 0x74757475 + small
        return words

    def make(generator: torch.Generator, dtype: torch.dtype) -> Inputs:
        return {
            "w13_EMKW": tiles(generator, 2 * inner, width),
            "w2_EMKW": tiles(generator, width, inner),
            "wide": False,
        }

    return make


def touched_and_rows(inputs: Inputs) -> tuple[int, int]:
    """Experts that are here and read, and the pairs with them."""
    here = inputs["expert_TR"][inputs["expert_TR"] >= 0]
    return len(here.unique()), len(here)


def packed(tokens: int, experts: int, active: int, width: int, inner: int, **rest: Any) -> Case:
    return Case(
        make=batches(tokens, experts, active, width), shared=weights(experts, width, inner), **rest
    )


def packed_work(inputs: Inputs, backward: bool) -> Work:
    x_TL, w13_EMKW, w2_EMKW = inputs["x_TL"], inputs["w13_EMKW"], inputs["w2_EMKW"]
    touched, rows = touched_and_rows(inputs)
    one_expert, inner = num_bytes(w13_EMKW[0], w2_EMKW[0]), w13_EMKW.shape[1] * ROWS // 2
    return Work(touched * one_expert + 2 * num_bytes(x_TL), 6 * rows * x_TL.shape[1] * inner)


def first_token(inputs: Inputs) -> Inputs:
    """With its own experts alone: the others would not fit as float64."""
    expert_1R = inputs["expert_TR"][:1]
    weights = {name: inputs[name][expert_1R[0]] for name in ("w13_EMKW", "w2_EMKW")}
    tokens = {name: inputs[name][:1] for name in ("x_TL", "weight_TR")}
    own = torch.arange(expert_1R.shape[1], device=expert_1R.device)[None]
    return inputs | weights | tokens | {"expert_TR": own}


def first_token_of_results(results: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name: y_TL[:1] for name, y_TL in results.items()}


_GPU = {"device": "cuda", "dtype": torch.bfloat16}
_BESIDE = {**_GPU, "peers": (TORCH, HUMMING)}

TOKENS = (1, 32, 128, 256, 1024, 4096)

BENCHES = {
    "experts": Bench(
        inside="both products, the activation, the weighted sum",
        work=work,
        cases={
            "T4_E16_R2": Case(make=routed(4, 16, 2, 128, 64)),
            "T256_E112_R2": Case(make=routed(256, 112, 2, 3584, 3072), **_GPU),
            "T4096_E112_R2": Case(make=routed(4096, 112, 2, 3584, 3072), **_GPU),
        },
    ),
    "experts_mxfp4": Bench(
        inside="the pairs' order, both products, the activation, the weighted sum",
        work=packed_work,
        excerpt=Excerpt(inputs=first_token, results=first_token_of_results),
        cases={
            "T4_E16_R2": packed(4, 16, 2, 128, 64),
            **{
                f"T{t}_E{experts}_R{active}": packed(
                    t, experts, active, 3584, 3072, graph=t <= 256, **_BESIDE
                )
                for experts, active in ((112, 2), (896, 16))
                for t in TOKENS
            },
        },
    ),
}
