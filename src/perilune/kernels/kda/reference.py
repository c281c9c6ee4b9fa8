"""Kimi Delta Attention in plain torch: the truth that every backend is held to.

Legend: T packed tokens, B rows, L tokens of a row, N sequences, H heads, K key width, V value
width, M chunks of a row, C tokens of a chunk.

Inputs come straight from the projections and the convolution; gate, L2 norm, query scale and beta
belong to the op. Source of the formulas: the Kimi K3 technical report, Eq. 1-6, and the Kimi
Linear paper (arXiv 2510.26692). All arithmetic is fp32 (fp64 for fp64 inputs); the running
sums of the chunked form are fp64.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from perilune.kernels.common.packing import Cuts, Packing, check_cuts

L2_EPS = 1e-6
CHUNK = 32
"""With the bound of -5 a chunk's log-decay spans 160, so factors taken about its middle stay within
e^±80: inside fp32 range. That is what lets one matrix product serve a whole chunk."""


class KDAOut(NamedTuple):
    o_THV: Tensor
    state_NHKV: Tensor | None
    """State after the last token of each sequence; None for segmented rows."""
    cut_EHKV: Tensor | None = None
    """States at the cuts, sequence by sequence, without gradient; None if none were asked for."""


class Prepared(NamedTuple):
    q_: Tensor
    k_: Tensor
    v_: Tensor
    g_: Tensor
    beta_: Tensor


def compute_dtype(x: Tensor) -> torch.dtype:
    return torch.float64 if x.dtype == torch.float64 else torch.float32


def gate(z_THK: Tensor, A_log_H: Tensor, lower_bound: float | None) -> Tensor:
    """Log-decay per key channel, <= 0: bounded (K3) or -exp(A) softplus(z) (Kimi Linear)."""
    rate_H1 = A_log_H.exp()[:, None]
    if lower_bound is not None:
        return lower_bound * torch.sigmoid(rate_H1 * z_THK)
    return -rate_H1 * torch.nn.functional.softplus(z_THK)


def l2_norm(x: Tensor) -> Tensor:
    """x / sqrt(sum(x^2) + 1e-6): eps on the sum, inside the root."""
    return x * torch.rsqrt(x.square().sum(-1, keepdim=True) + L2_EPS)


def prepare(
    q_THK: Tensor,
    k_THK: Tensor,
    v_THV: Tensor,
    z_THK: Tensor,
    b_TH: Tensor,
    A_log_H: Tensor,
    dt_bias_HK: Tensor,
    lower_bound: float | None,
) -> Prepared:
    dtype = compute_dtype(q_THK)
    z_THK = z_THK.to(dtype) + dt_bias_HK.to(dtype)
    return Prepared(
        l2_norm(q_THK.to(dtype)) * q_THK.shape[-1] ** -0.5,
        l2_norm(k_THK.to(dtype)),
        v_THV.to(dtype),
        gate(z_THK, A_log_H.to(dtype), lower_bound),
        torch.sigmoid(b_TH.to(dtype)),
    )


def kda_chunk(
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
    """The recurrence in chunks of matrix products (Kimi Linear, Eq. 7-12; an exact identity).

    `packing` with `segment_BL` resets state at document boundaries inside a row and returns no
    state. Returns outputs in the dtype of `v_THV`, the fp32 states after each sequence, and those
    at the cuts.
    """
    if cuts is not None:
        check_cuts(cuts, packing)
        rows = (q_THK, k_THK, v_THV, z_THK, b_TH)
        return _in_pieces(rows, (A_log_H, dt_bias_HK), packing, lower_bound, state_NHKV, cuts)
    x = prepare(q_THK, k_THK, v_THV, z_THK, b_TH, A_log_H, dt_bias_HK, lower_bound)
    rows = Prepared(*(_to_chunks(packing.to_rows(value)) for value in x))
    segment_BMC = None
    if packing.segment_BL is not None:
        segment_BMC = _chunk_segments(packing.segment_BL)
    o_BHMCV, state = _chunked(rows, lower_bound is not None, segment_BMC, state_NHKV)
    b, h, m, c, v = o_BHMCV.shape
    o_BLHV = o_BHMCV.permute(0, 2, 3, 1, 4).reshape(b, m * c, h, v)[:, : packing.max_len]
    return KDAOut(
        packing.from_rows(o_BLHV).to(v_THV.dtype), None if segment_BMC is not None else state
    )


def _in_pieces(
    rows: tuple[Tensor, ...],
    gate: tuple[Tensor, Tensor],
    packing: Packing,
    lower_bound: float | None,
    state_NHKV: Tensor | None,
    cuts: Cuts,
) -> KDAOut:
    """Every sequence from cut to cut."""
    outputs, states, at_cuts = [rows[2][:0]], [], []
    sizes = *rows[1].shape[1:], rows[2].shape[2]
    for n, (first, length) in enumerate(zip(packing.cu_seqlens, packing.lengths, strict=False)):
        state = None if state_NHKV is None else state_NHKV[n : n + 1]
        begin = 0
        for end in sorted({*cuts[n], length} - {0}):
            q, k, v, z, b = (x[first + begin : first + end] for x in rows)
            alone = Packing.of((end - begin,))
            o_THV, state, _ = kda_chunk(q, k, v, z, b, *gate, alone, lower_bound, state)
            assert state is not None
            outputs.append(o_THV)
            begin = end
            if end in cuts[n]:
                at_cuts.append(state.detach())
        states.append(rows[0].new_zeros(1, *sizes) if state is None else state)
    wide = torch.promote_types(torch.float32, rows[0].dtype)
    found = torch.cat(at_cuts) if at_cuts else rows[0].new_zeros(0, *sizes, dtype=wide)
    return KDAOut(torch.cat(outputs), torch.cat(states).to(wide), found)


def _to_chunks(x_BLH: Tensor) -> Tensor:
    """[B, L, H, ...] -> [B, H, M, C, ...], the tail padded with zeros; one chunk at least.

    A zero key with zero log-decay and zero beta leaves the state as it is.
    """
    pad = -x_BLH.shape[1] % CHUNK if x_BLH.shape[1] else CHUNK
    if pad:
        zeros = x_BLH.new_zeros(x_BLH.shape[0], pad, *x_BLH.shape[2:])
        x_BLH = torch.cat([x_BLH, zeros], dim=1)
    b, length = x_BLH.shape[:2]
    chunked = x_BLH.view(b, length // CHUNK, CHUNK, *x_BLH.shape[2:])
    return chunked.movedim(3, 1)


def _chunk_segments(segment_BL: Tensor) -> Tensor:
    """[B, L] -> [B, M, C]; padding continues the last document."""
    pad = -segment_BL.shape[1] % CHUNK
    if pad:
        segment_BL = torch.cat([segment_BL, segment_BL[:, -1:].expand(-1, pad)], dim=1)
    return segment_BL.view(segment_BL.shape[0], -1, CHUNK)


def _scores(x_C: Tensor, k_C: Tensor, decay_C: Tensor, bounded: bool) -> Tensor:
    """sum_c x_i[c] k_j[c] exp(G_i[c] - G_j[c]); valid on and below the diagonal."""
    if bounded:
        about = decay_C[..., CHUNK // 2 - 1 : CHUNK // 2, :]
        return (x_C * (decay_C - about).exp().to(x_C.dtype)) @ (
            k_C * (about - decay_C).exp().to(x_C.dtype)
        ).mT
    gap = (decay_C[..., :, None, :] - decay_C[..., None, :, :]).clamp(max=0).to(x_C.dtype)
    return torch.einsum("...ik,...jk,...ijk->...ij", x_C, k_C, gap.exp())


def _chunked(
    x: Prepared, bounded: bool, segment_BMC: Tensor | None, state_BHKV: Tensor | None
) -> tuple[Tensor, Tensor]:
    decay = x.g_.double().cumsum(-2)
    index = torch.arange(CHUNK, device=decay.device)
    lower = index[:, None] >= index[None, :]
    carried = kept = None
    if segment_BMC is not None:
        same = segment_BMC[..., :, None] == segment_BMC[..., None, :]
        lower = (lower & same)[:, None]
        before = torch.cat([segment_BMC[:, :1, 0] - 1, segment_BMC[:, :-1, -1]], dim=1)
        carried = (segment_BMC == before[..., None])[:, None, ..., None]
        kept = (segment_BMC == segment_BMC[..., -1:])[:, None, ..., None]
    strict = lower & (index[:, None] > index[None, :])

    zero = x.q_.new_zeros(())
    beta = x.beta_[..., None]
    # Masked before anything multiplies it: above the diagonal a score may be infinite.
    lhs = beta * torch.where(strict, _scores(x.k_, x.k_, decay, bounded), zero)
    attn = torch.where(lower, _scores(x.q_, x.k_, decay, bounded), zero)

    from_start = decay.exp().to(x.q_.dtype)
    q_in, k_in = x.q_ * from_start, x.k_ * from_start
    k_out = x.k_ * (decay[..., -1:, :] - decay).exp().to(x.k_.dtype)
    keep_K = from_start[..., -1, :]
    if carried is not None and kept is not None:
        q_in, k_in, k_out = q_in * carried, k_in * carried, k_out * kept
        keep_K = keep_K * carried[..., -1, :]
    v_width = x.v_.shape[-1]
    solved = torch.linalg.solve_triangular(
        lhs, beta * torch.cat([x.v_, k_in], dim=-1), upper=False, unitriangular=True
    )
    u, w = solved[..., :v_width], solved[..., v_width:]

    # Affine step of a chunk: S <- (diag(keep) - k_out^T W) S + k_out^T U. One product a chunk.
    step_KK = torch.diag_embed(keep_K) - k_out.mT @ w
    write_KV = k_out.mT @ u
    states = _scan(step_KK, write_KV, state_BHKV)
    before_BHMKV = torch.stack(states[:-1], dim=2)
    o = q_in @ before_BHMKV + attn @ (u - w @ before_BHMKV)
    return o, states[-1]


def _scan(step_BHMKK: Tensor, write_BHMKV: Tensor, state_BHKV: Tensor | None) -> list[Tensor]:
    """States before each chunk and after the last one."""
    b, h, m, k, v = write_BHMKV.shape
    step = step_BHMKK.reshape(b * h, m, k, k)
    write = write_BHMKV.reshape(b * h, m, k, v)
    state = write.new_zeros(b * h, k, v)
    if state_BHKV is not None:
        state = state_BHKV.to(write.dtype).reshape(b * h, k, v)
    states = [state]
    for i in range(m):
        state = torch.baddbmm(write[:, i], step[:, i], state)
        states.append(state)
    return [s.view(b, h, k, v) for s in states]


def kda_decode(
    q_NHK: Tensor,
    k_NHK: Tensor,
    v_NHV: Tensor,
    z_NHK: Tensor,
    b_NH: Tensor,
    A_log_H: Tensor,
    dt_bias_HK: Tensor,
    state_NHKV: Tensor,
    lower_bound: float | None = None,
) -> Tensor:
    """One token of N sequences. Mutates `state_NHKV`; returns the outputs [N, H, V]."""
    x = prepare(q_NHK, k_NHK, v_NHV, z_NHK, b_NH, A_log_H, dt_bias_HK, lower_bound)
    decayed_NHKV = x.g_.exp()[..., None] * state_NHKV
    delta_NH1V = x.v_[:, :, None, :] - x.k_[:, :, None, :] @ decayed_NHKV
    after_NHKV = decayed_NHKV + (x.beta_[..., None] * x.k_)[..., None] * delta_NH1V
    state_NHKV.copy_(after_NHKV)
    return (x.q_[:, :, None, :] @ after_NHKV)[:, :, 0].to(v_NHV.dtype)
