"""Sizes and least work of AttnRes: every source read once, the mixture written.

A step reads the update, too, and writes the new sum. Backward: the sources and the gradient of the
result read, the gradients of the sources written.
"""

from __future__ import annotations

import torch

from perilune.kernels.attn_res.bench_peers import FLA
from perilune.kernels.bench.cases import Bench, Case, Make, Work, drawn
from perilune.kernels.registry import Inputs


def read(sources: int, tokens: int, width: int) -> Make:
    """`sources` with the running sum, and nothing else."""

    def make(generator: torch.Generator, dtype: torch.dtype) -> Inputs:
        return {
            "partial_TD": drawn(generator, dtype, tokens, width),
            "blocks_NTD": drawn(generator, dtype, sources - 1, tokens, width),
            "query_D": drawn(generator, dtype, width, scale=width**-0.5),
            "eps": 1e-5,
        }

    return make


def step(sources: int, tokens: int, width: int) -> Make:
    """As a layer asks for it: a sum to be updated, a mixture to be normed."""
    plain = read(sources, tokens, width)

    def make(generator: torch.Generator, dtype: torch.dtype) -> Inputs:
        return plain(generator, dtype) | {
            "update_TD": drawn(generator, dtype, tokens, width),
            "weight_D": drawn(generator, dtype, width),
            "norm_eps": 1e-5,
        }

    return make


def work(inputs: Inputs, backward: bool) -> Work:
    """Bytes = T D (M + 1) e of M sources, 2 T D e more with an update, and backward T D (2 M + 1) e
    more, and as much as a source with a gradient of the new sum; flops: squares, scores and
    mixture, two each, and eight more."""
    sources = len(inputs["blocks_NTD"]) + 1
    t, d = inputs["partial_TD"].shape
    updated = "update_TD" in inputs
    rows = sources + 1 + 2 * updated
    if backward:
        rows += 2 * sources + 1 + updated
    flops = (14 if backward else 6) * sources * t * d
    return Work(t * d * rows * inputs["partial_TD"].element_size(), flops)


_GPU = {"device": "cuda", "dtype": torch.bfloat16, "peers": (FLA,)}
_IN_GRAPH = {**_GPU, "graph": True}

BENCHES = {
    "attn_res": Bench(
        inside="update of the sum, norm of the sources, scores, softmax, mixture, its norm",
        work=work,
        cases={
            "N9_T8_D7168": Case(make=step(9, 8, 7168)),
            "N4_T8192_D7168": Case(make=read(4, 8192, 7168), **_IN_GRAPH),
            "N9_T8192_D7168": Case(make=read(9, 8192, 7168), **_IN_GRAPH),
            "N4_T8192_D7168_step": Case(make=step(4, 8192, 7168), **_IN_GRAPH),
            "N9_T8192_D7168_step": Case(make=step(9, 8192, 7168), **_IN_GRAPH),
            "N4_T8192_D7168_backward": Case(make=read(4, 8192, 7168), backward=True, **_GPU),
            "N9_T8192_D7168_backward": Case(make=read(9, 8192, 7168), backward=True, **_GPU),
            "N9_T8192_D7168_step_backward": Case(make=step(9, 8192, 7168), backward=True, **_GPU),
            "N9_T1_D7168": Case(make=step(9, 1, 7168), **_IN_GRAPH),
            "N9_T32_D7168": Case(make=step(9, 32, 7168), **_IN_GRAPH),
            "N9_T256_D7168": Case(make=step(9, 256, 7168), **_IN_GRAPH),
        },
    ),
}
