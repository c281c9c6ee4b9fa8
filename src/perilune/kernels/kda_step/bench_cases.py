"""Sizes and least work of one decoded step of a KDA layer.

Legend: N sequences, S slots, H heads, K key width, V value width, C = 2 H K + H V channels, W taps.

A token moves its state and its window twice and every activation once: N (2 H K V b + 2 (W - 1) C w
+ (C + H (K + 2 V + 1)) e) bytes, b, w and e of the dtypes of state, window and activations.
"""

from __future__ import annotations

import torch
from torch import Tensor

from perilune.kernels.bench.cases import Bench, Bound, Case, Make, Peer, Work, drawn
from perilune.kernels.kda.bench_peers import FLA_DECODE, fla_decode
from perilune.kernels.registry import Inputs

TAPS = 4


def step(sequences: int, heads: int, width: int = 128) -> Make:
    """One token of each, with the slots of the pools in no order."""

    def make(generator: torch.Generator, dtype: torch.dtype) -> Inputs:
        n, c, fp32 = sequences, 3 * heads * width, torch.float32
        order = torch.rand(n, generator=generator, device=generator.device).argsort()
        return {
            "qkv_TC": drawn(generator, dtype, n, c),
            "z_THK": drawn(generator, dtype, n, heads, width),
            "b_TH": drawn(generator, dtype, n, heads),
            "gate_THV": drawn(generator, dtype, n, heads, width),
            "conv_CW": drawn(generator, fp32, c, TAPS, scale=0.5),
            "A_log_H": drawn(generator, fp32, heads, scale=0.5),
            "dt_bias_HK": drawn(generator, fp32, heads, width, scale=0.3),
            "norm_V": drawn(generator, fp32, width),
            "window_SWC": drawn(generator, fp32, n, TAPS - 1, c),
            "state_SHKV": drawn(generator, fp32, n, heads, width, width),
            "slot_N": order,
            "lower_bound": -5.0,
            "eps": 1e-5,
        }

    return make


def work(inputs: Inputs, backward: bool) -> Work:
    state_SHKV, window_SWC = inputs["state_SHKV"], inputs["window_SWC"]
    n, (h, k, v) = inputs["slot_N"].shape[0], state_SHKV.shape[1:]
    e, c = inputs["qkv_TC"].element_size(), inputs["qkv_TC"].shape[1]
    slot = state_SHKV[0].numel() * state_SHKV.element_size()
    window = window_SWC[0].numel() * window_SWC.element_size()
    token = (c + h * (k + 2 * v + 1)) * e
    return Work(n * (2 * slot + 2 * window + token), n * h * 7 * k * v)


def fla_recurrence(inputs: Inputs, backward: bool) -> Bound:
    """fla has no such op: its recurrence alone, on inputs of the same size, is the yardstick."""
    n, h, k = inputs["z_THK"].shape
    q, key, value = (x.reshape(n, h, k).contiguous() for x in inputs["qkv_TC"].chunk(3, dim=1))
    part = {
        "q_NHK": q,
        "k_NHK": key,
        "v_NHV": value,
        "z_NHK": inputs["z_THK"],
        "b_NH": inputs["b_TH"],
        "A_log_H": inputs["A_log_H"],
        "dt_bias_HK": inputs["dt_bias_HK"],
        "state_NHKV": inputs["state_SHKV"],
        "lower_bound": inputs["lower_bound"],
    }
    return Bound(fla_decode(part, backward).call, _nothing_to_compare)


def _nothing_to_compare(out: object) -> list[Tensor]:
    return []


FLA = Peer(
    name="fla fused_recurrent_kda, the recurrence alone",
    distribution=FLA_DECODE.distribution,
    module=FLA_DECODE.module,
    bind=f"{__name__}:fla_recurrence",
)
_DECODED = {"device": "cuda", "dtype": torch.bfloat16, "graph": True, "peers": (FLA,)}

BENCHES = {
    "kda_step": Bench(
        inside="convolution, gate, L2 norm, beta, recurrence, gated norm, states in place",
        work=work,
        cases={
            "N4_H16_K64": Case(make=step(4, 16, 64)),
            "N256_H96": Case(make=step(256, 96), **_DECODED),
            "N32_H96": Case(make=step(32, 96), **_DECODED),
            "N1_H96": Case(make=step(1, 96), **_DECODED),
        },
    ),
}
