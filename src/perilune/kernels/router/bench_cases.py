"""Sizes and least work of the router and of the permutation, in bytes.

Router: the logits read, ids and weights of what is chosen written; backward, the weights' gradient
read and the logits' written. Nobody writes scores. Permutation: ids read, both directions written.
"""

from __future__ import annotations

import torch

from perilune.kernels.bench.cases import Bench, Case, Make, Work, drawn, num_bytes
from perilune.kernels.registry import Inputs
from perilune.kernels.router.bench_peers import CHOOSE, GROUP


def tokens(count: int, experts: int, active: int) -> Make:
    def make(generator: torch.Generator, dtype: torch.dtype) -> Inputs:
        return {
            "logits_TE": drawn(generator, dtype, count, experts),
            "bias_E": drawn(generator, torch.float32, experts, scale=0.3),
            "num_active": active,
            "renormalize": True,
            "scale": 2.446,
        }

    return make


def pairs(count: int, experts: int, active: int) -> Make:
    """Each token has other experts."""

    def make(generator: torch.Generator, dtype: torch.dtype) -> Inputs:
        scores_TE = torch.rand(count, experts, generator=generator, device=generator.device)
        expert_TR = scores_TE.topk(active, dim=-1).indices.to(dtype)
        return {"expert_TR": expert_TR, "num_experts": experts}

    return make


def route_work(inputs: Inputs, backward: bool) -> Work:
    logits_TE, r = inputs["logits_TE"], inputs["num_active"]
    chosen = logits_TE.shape[0] * r * (8 + 4)
    if not backward:
        return Work(num_bytes(logits_TE) + chosen, 5 * logits_TE.numel())
    gradient = num_bytes(logits_TE) + logits_TE.shape[0] * r * 4
    return Work(num_bytes(logits_TE) + chosen + gradient, 5 * logits_TE.numel())


def permute_work(inputs: Inputs, backward: bool) -> Work:
    expert_TR = inputs["expert_TR"]
    return Work(num_bytes(expert_TR) + 2 * 4 * expert_TR.numel(), expert_TR.numel())


_GPU = {"device": "cuda", "graph": True}
_PAIRS = {"dtype": torch.int64, "peers": GROUP, **_GPU}

BENCHES = {
    "router": Bench(
        inside="sigmoid, biased choice, renormalised weights",
        work=route_work,
        cases={
            "T8_E896_R16": Case(make=tokens(8, 896, 16)),
            "T8192_E896_R16": Case(make=tokens(8192, 896, 16), peers=CHOOSE, **_GPU),
            "T8192_E896_R32": Case(make=tokens(8192, 896, 32), **_GPU),
            "T8192_E896_R16_backward": Case(
                make=tokens(8192, 896, 16), device="cuda", backward=True
            ),
            "T256_E896_R16": Case(make=tokens(256, 896, 16), peers=CHOOSE, **_GPU),
            "T32_E896_R16": Case(make=tokens(32, 896, 16), peers=CHOOSE, **_GPU),
            "T1_E896_R16": Case(make=tokens(1, 896, 16), **_GPU),
        },
    ),
    "permute": Bench(
        inside="experts' offsets, pairs by expert, the inverse",
        work=permute_work,
        cases={
            "T8_E896_R16": Case(make=pairs(8, 896, 16), dtype=torch.int64),
            "T8192_E896_R16": Case(make=pairs(8192, 896, 16), **_PAIRS),
            "T256_E896_R16": Case(make=pairs(256, 896, 16), **_PAIRS),
            "T32_E896_R16": Case(make=pairs(32, 896, 16), **_PAIRS),
        },
    ),
}
