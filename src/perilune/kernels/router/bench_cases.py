"""Sizes and least work of the router: logits read, scores and choices written.

Backward: the scores and their gradient read, the logits' gradient written.
"""

from __future__ import annotations

import torch

from perilune.kernels.bench.cases import Bench, Case, Make, Work, drawn, num_bytes
from perilune.kernels.registry import Inputs


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


def work(inputs: Inputs, backward: bool) -> Work:
    logits_TE = inputs["logits_TE"]
    passes, flops = (5, 10) if backward else (2, 5)
    return Work(passes * num_bytes(logits_TE), flops * logits_TE.numel())


BENCHES = {
    "router": Bench(
        inside="sigmoid, biased choice, renormalised weights",
        work=work,
        cases={
            "T8_E896_R16": Case(make=tokens(8, 896, 16)),
            "T8192_E896_R16": Case(make=tokens(8192, 896, 16), device="cuda"),
            "T8192_E896_R16_backward": Case(
                make=tokens(8192, 896, 16), device="cuda", backward=True
            ),
            "T8192_E896_R32": Case(make=tokens(8192, 896, 32), device="cuda"),
            "T32_E896_R16": Case(make=tokens(32, 896, 16), device="cuda", graph=True),
        },
    ),
}
