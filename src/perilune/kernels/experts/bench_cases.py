"""Sizes and least work of the routed experts: the weights of those that are touched, once."""

from __future__ import annotations

import torch

from perilune.kernels.bench.cases import Bench, Case, Make, Work, drawn, num_bytes
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
    touched = len(inputs["expert_TR"].unique())
    one_expert = num_bytes(w13_E2IL[0], w2_ELI[0])
    rows, (width, inner) = inputs["expert_TR"].numel(), w2_ELI.shape[1:]
    return Work(touched * one_expert + 2 * num_bytes(x_TL), 2 * rows * 3 * width * inner)


_GPU = {"device": "cuda", "dtype": torch.bfloat16}

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
}
