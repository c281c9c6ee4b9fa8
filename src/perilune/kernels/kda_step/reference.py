"""One step of a KDA layer between its projections: convolution, recurrence, gated norm.

Legend: N sequences, L tokens of each, T = N L tokens (a sequence's are neighbours), S slots of the
pools, H heads, K key width, V value width, C = 2 H K + H V channels, W taps.
"""

from __future__ import annotations

import torch
from torch import Tensor

from perilune.kernels.causal_conv.reference import causal_conv_decode
from perilune.kernels.kda.reference import kda_decode
from perilune.kernels.norm.reference import gated_rms_norm


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
    """o_THV = gated_rms_norm(kda(silu(conv(qkv)))), L tokens of each sequence one after another.

    `slot_N` says where in the pools a sequence's window and state lie; both are overwritten with
    what they are after `keep_N` of its L tokens (None: all of them). So draft tokens are verified
    with 0, and those that were accepted are written by a second call. A negative slot is padding:
    its outputs are zero and no slot changes.
    """
    n, (h, k, v) = slot_N.shape[0], state_SHKV.shape[1:]
    length = qkv_TC.shape[0] // max(1, n)
    kept = [length] * n if keep_N is None else keep_N.tolist()
    o_THV = torch.zeros_like(gate_THV)
    for i, slot in enumerate(slot_N.tolist()):
        if slot < 0:
            continue
        window, state = window_SWC[slot : slot + 1].clone(), state_SHKV[slot : slot + 1].clone()
        # Rounded to the pool's dtype once, when it is kept.
        state = state.to(torch.promote_types(torch.float32, state.dtype))
        for step in range(length):
            t = slice(i * length + step, i * length + step + 1)
            y_1C = causal_conv_decode(qkv_TC[t], conv_CW, window)
            q, key, value = y_1C.split([h * k, h * k, h * v], dim=-1)
            o_1HV = kda_decode(
                q.view(1, h, k),
                key.view(1, h, k),
                value.view(1, h, v),
                z_THK[t],
                b_TH[t],
                A_log_H,
                dt_bias_HK,
                state,
                lower_bound,
            )
            o_THV[t] = gated_rms_norm(o_1HV, gate_THV[t], norm_V, eps)
            if step + 1 == kept[i]:
                window_SWC[slot], state_SHKV[slot] = window[0], state[0]
    return o_THV
