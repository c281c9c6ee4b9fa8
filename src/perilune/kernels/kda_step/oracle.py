"""The step as its definitions read, one sequence and one token at a time. For conformance only."""

from __future__ import annotations

import torch
from torch import Tensor

from perilune.kernels.causal_conv.oracle import causal_conv
from perilune.kernels.common.packing import Packing
from perilune.kernels.kda.oracle import kda_recurrent
from perilune.kernels.norm.oracle import gated_rms_norm


def kda_step(
    qkv_TC: Tensor,
    z_THK: Tensor,
    b_TH: Tensor,
    gate_THV: Tensor,
    conv_CW: Tensor,
    A_log_H: Tensor,
    dt_bias_HK: Tensor,
    norm_V: Tensor,
    window_SWC: Tensor,
    state_SHKV: Tensor,
    slot_N: Tensor,
    lower_bound: float | None,
    eps: float,
    keep_N: Tensor | None = None,
) -> Tensor:
    length = qkv_TC.shape[0] // slot_N.shape[0]
    h, k, v = state_SHKV.shape[1:]
    window_before, state_before = window_SWC.clone(), state_SHKV.clone()

    def after(i: int, slot: int, count: int) -> tuple[Tensor, Tensor, Tensor]:
        """Outputs, window and state after the first `count` tokens of sequence i."""
        rows = slice(i * length, i * length + count)
        one = Packing.of([count])
        conv = causal_conv(qkv_TC[rows], conv_CW, one, window_before[slot : slot + 1])
        q, key, value = conv.y_TC.split([h * k, h * k, h * v], dim=-1)
        out = kda_recurrent(
            q.unflatten(1, (h, k)),
            key.unflatten(1, (h, k)),
            value.unflatten(1, (h, v)),
            z_THK[rows],
            b_TH[rows],
            A_log_H,
            dt_bias_HK,
            one,
            lower_bound,
            state_before[slot : slot + 1],
        )
        assert conv.window_NWC is not None
        assert out.state_NHKV is not None
        o_THV = gated_rms_norm(out.o_THV, gate_THV[rows], norm_V, eps)
        return o_THV, conv.window_NWC[0], out.state_NHKV[0]

    outputs = []
    for i, slot in enumerate(slot_N.tolist()):
        if slot < 0:
            outputs.append(torch.zeros_like(gate_THV[:length]))
            continue
        outputs.append(after(i, slot, length)[0])
        kept = length if keep_N is None else int(keep_N[i])
        if kept:
            _, window_SWC[slot], state_SHKV[slot] = after(i, slot, kept)
    return torch.cat(outputs)
