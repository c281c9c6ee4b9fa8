"""Sizes, least work and peers of KDA.

Legend: T packed tokens, N sequences, H heads, K key width, V value width, C tokens of a chunk.

Least work of a prefill (for K = V = d): bytes = T H (5 d + 1) e + states, for q, k, v, z, o and
beta of e bytes, each once. flops = T H (6 d^2 + 3 C d + C^2) (arXiv 2510.26692, eq. 13), with the
smallest chunk in use, 16. Backward: the inputs and the gradient of o are read again and five
gradients written, T H (9 d + 2) e more, at three times the flops in all.
"""

from __future__ import annotations

import torch
from torch import Tensor

from perilune.kernels.bench.cases import Bench, Case, Excerpt, Make, Work, drawn, num_bytes
from perilune.kernels.common.packing import Packing
from perilune.kernels.kda.bench_peers import FLA_CHUNK, FLA_KEPT, FLASH
from perilune.kernels.registry import Inputs

SMALLEST_CHUNK = 16
EXCERPT_HEADS = 2
"""The reference keeps a K x K matrix a chunk and head: at 65536 tokens only a few heads fit."""


def sequences(lengths: tuple[int, ...], heads: int, width: int = 128) -> Make:
    """Packed prefills, each from a state that is not zero."""

    def make(generator: torch.Generator, dtype: torch.dtype) -> Inputs:
        t, fp32 = sum(lengths), torch.float32
        wide = (t, heads, width)
        return {
            "q_THK": drawn(generator, dtype, *wide),
            "k_THK": drawn(generator, dtype, *wide),
            "v_THV": drawn(generator, dtype, *wide),
            "z_THK": drawn(generator, dtype, *wide),
            "b_TH": drawn(generator, dtype, t, heads),
            "A_log_H": drawn(generator, fp32, heads, scale=0.5),
            "dt_bias_HK": drawn(generator, fp32, heads, width, scale=0.3),
            "packing": Packing.of(lengths),
            "lower_bound": -5.0,
            "state_NHKV": drawn(generator, fp32, len(lengths), heads, width, width),
        }

    return make


def prefill_work(inputs: Inputs, backward: bool) -> Work:
    q_THK, state_NHKV = inputs["q_THK"], inputs["state_NHKV"]
    (t, h, k), v = q_THK.shape, inputs["v_THV"].shape[-1]
    tokens = t * h * (3 * k + 2 * v + 1) * q_THK.element_size()
    flops = t * h * (6 * k * v + 3 * SMALLEST_CHUNK * k + SMALLEST_CHUNK**2)
    if not backward:
        return Work(tokens + 2 * num_bytes(state_NHKV), flops)
    again = t * h * (6 * k + 3 * v + 2) * q_THK.element_size()
    return Work(tokens + again + 4 * num_bytes(state_NHKV), 3 * flops)


def first_heads(inputs: Inputs) -> Inputs:
    """Heads know nothing of each other."""
    return {
        name: _first_along_h(name, x) if isinstance(x, Tensor) else x for name, x in inputs.items()
    }


def first_heads_of_results(results: dict[str, Tensor]) -> dict[str, Tensor]:
    # Outputs are [T, H, V] and [N, H, K, V].
    return {
        name: x[:, :EXCERPT_HEADS] if name.startswith("output ") else _first_along_h(name, x)
        for name, x in results.items()
    }


def _first_along_h(name: str, x: Tensor) -> Tensor:
    axis = name.rpartition("_")[2].index("H")
    part = x.narrow(axis, 0, min(EXCERPT_HEADS, x.shape[axis]))
    return part.detach().requires_grad_(x.requires_grad)


_PREFILL = "gate, L2 norm, beta, initial and final state"
_FORWARD = {"device": "cuda", "dtype": torch.bfloat16, "peers": (FLASH, FLA_CHUNK)}
_TRAINED = {"device": "cuda", "dtype": torch.bfloat16, "peers": (FLA_CHUNK, FLA_KEPT)}

BENCHES = {
    "kda_chunk": Bench(
        inside=_PREFILL,
        work=prefill_work,
        excerpt=Excerpt(inputs=first_heads, results=first_heads_of_results),
        cases={
            "T256_H4_K64": Case(make=sequences((256,), 4, 64)),
            "T128_H4_K64_backward": Case(make=sequences((128,), 4, 64), backward=True),
            "T8192_H96": Case(make=sequences((8192,), 96), **_FORWARD),
            "8x1024_H96": Case(make=sequences((1024,) * 8, 96), **_FORWARD),
            "mixed_8192_H96": Case(
                make=sequences((1300, 547, 2048, 963, 271, 3063), 96), **_FORWARD
            ),
            "T65536_H96": Case(make=sequences((65536,), 96), **_FORWARD),
            "T8192_H32": Case(make=sequences((8192,), 32), **_FORWARD),
            "T8192_H12": Case(make=sequences((8192,), 12), **_FORWARD),
            "T65536_H4": Case(make=sequences((65536,), 4), **_FORWARD),
            "T8192_H96_backward": Case(make=sequences((8192,), 96), backward=True, **_TRAINED),
        },
    ),
}
