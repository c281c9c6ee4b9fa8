"""The recurrence as its definition reads: one head, one token at a time. For conformance only.

Source: the Kimi K3 report, Eq. 1-6; Kimi Linear (arXiv 2510.26692) for the unbounded decay.

Legend: T packed tokens, N sequences, H heads, K key width, V value width.
"""

from __future__ import annotations

import torch
from torch import Tensor

from perilune.kernels.common.packing import Cuts, Packing
from perilune.kernels.kda.reference import KDAOut


def kda_recurrent(
    q_THK: Tensor,
    k_THK: Tensor,
    v_THV: Tensor,
    z_THK: Tensor,
    b_TH: Tensor,
    A_log_H: Tensor,
    dt_bias_HK: Tensor,
    packing: Packing,
    lower_bound: float | None = None,
    state_NHKV: Tensor | None = None,
    cuts: Cuts | None = None,
) -> KDAOut:
    t, heads, width = v_THV.shape
    outputs: list[list[Tensor]] = [[] for _ in range(t)]
    finals: list[list[Tensor]] = []
    at_cuts: dict[tuple[int, int], list[Tensor]] = {}
    for n, start in enumerate(packing.cu_seqlens[:-1]):
        finals.append([])
        for h in range(heads):
            zeros_KV = v_THV.new_zeros(q_THK.shape[2], width)
            S_KV = zeros_KV if state_NHKV is None else state_NHKV[n, h]
            for i in range(start, packing.cu_seqlens[n + 1]):
                if _starts_document(packing, n, i - start):
                    S_KV = zeros_KV
                g_K = _log_decay(z_THK[i, h] + dt_bias_HK[h], A_log_H[h], lower_bound)
                S_KV, o_V = _step(S_KV, q_THK[i, h], k_THK[i, h], v_THV[i, h], g_K, b_TH[i, h])
                outputs[i].append(o_V)
                if cuts is not None and i + 1 - start in cuts[n]:
                    at_cuts.setdefault((n, i), []).append(S_KV.detach())
            finals[n].append(S_KV)
    o_THV = torch.stack([torch.stack(o_H) for o_H in outputs]) if outputs else v_THV[:0]
    state = torch.stack([torch.stack(S_H) for S_H in finals])
    found = None if cuts is None else torch.stack([torch.stack(S_H) for S_H in at_cuts.values()])
    return KDAOut(o_THV, None if packing.segment_BL is not None else state, found)


def _starts_document(packing: Packing, row: int, at: int) -> bool:
    if packing.segment_BL is None or at == 0:
        return False
    return bool(packing.segment_BL[row, at] != packing.segment_BL[row, at - 1])


def _log_decay(z_K: Tensor, A_log: Tensor, lower_bound: float | None) -> Tensor:
    if lower_bound is None:
        return -torch.exp(A_log) * torch.log(1 + torch.exp(z_K))
    return lower_bound * torch.sigmoid(torch.exp(A_log) * z_K)


def _step(
    S_KV: Tensor, q_K: Tensor, k_K: Tensor, v_V: Tensor, g_K: Tensor, b: Tensor
) -> tuple[Tensor, Tensor]:
    q_K = _unit(q_K) / len(q_K) ** 0.5
    k_K = _unit(k_K)
    decayed_KV = torch.diag(torch.exp(g_K)) @ S_KV
    error_V = v_V - decayed_KV.t() @ k_K
    S_KV = decayed_KV + torch.sigmoid(b) * torch.outer(k_K, error_V)
    return S_KV, S_KV.t() @ q_K


def _unit(u_K: Tensor) -> Tensor:
    return u_K / torch.sqrt(torch.dot(u_K, u_K) + 1e-6)
