"""Multi-head latent attention without positions: expanded for prefill, absorbed for decode.

Legend: T packed tokens, B rows, L tokens of a row, S cached tokens, H heads, K query width = N a
head's own + R shared key channels, V value width, C latent width.
Source: Kimi K3 report Eq. 7; absorbed form: DeepSeek-V2 (arXiv 2405.04434), section 2.1.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention as sdpa

from perilune.kernels.common.packing import Packing


def mla_prefill(
    q_THK: Tensor,
    k_SHN: Tensor,
    shared_SR: Tensor,
    v_SHV: Tensor,
    packing: Packing,
    scale: float,
    keys: Packing | None = None,
) -> Tensor:
    """Causal attention of each sequence (each document, in segmented rows) with itself.

    A key is a head's own N channels and then the R that all heads share, K = N + R. `keys` says
    how many rows of keys and values each sequence has; None: as many as queries. Its queries are
    the last tokens of these, and see everything up to themselves (prefill in chunks).

    Raises:
        ValueError: `keys` are of segmented rows, of other sequences, or fewer than queries.
    """
    check_keys(packing, keys)
    k_SHK = with_shared(k_SHN, shared_SR)
    if packing.segment_BL is not None:
        mask = _document_mask(packing.segment_BL)
        q, k, v = (packing.to_rows(x).transpose(1, 2) for x in (q_THK, k_SHK, v_SHV))
        o = sdpa(q, k, v, attn_mask=mask, scale=scale)
        return packing.from_rows(o.transpose(1, 2))
    of_keys = (packing if keys is None else keys).lengths
    parts = q_THK.split(packing.lengths), k_SHK.split(of_keys), v_SHV.split(of_keys)
    outputs = [_extend(q, k, v, scale) for q, k, v in zip(*parts, strict=True)]
    return outputs[0] if len(outputs) == 1 else torch.cat(outputs)


def check_keys(packing: Packing, keys: Packing | None) -> None:
    """Raises:
    ValueError: `keys` cannot be those of `packing`.
    """
    if keys is None:
        return
    if packing.segment_BL is not None or keys.segment_BL is not None:
        raise ValueError("rows of several documents have no keys in front")
    if packing.num_sequences != keys.num_sequences:
        raise ValueError(f"keys of {keys.num_sequences} sequences for {packing.num_sequences}")
    for t, s in zip(packing.lengths, keys.lengths, strict=True):
        if t > s:
            raise ValueError(f"{t} queries are the last of {s} tokens only where there are as many")


def with_shared(k_SHN: Tensor, shared_SR: Tensor) -> Tensor:
    """Whole keys [S, H, N + R]: the shared channels are copied out to every head."""
    return torch.cat([k_SHN, shared_SR[:, None].expand(-1, k_SHN.shape[1], -1)], dim=-1)


def _extend(q_THK: Tensor, k_SHK: Tensor, v_SHV: Tensor, scale: float) -> Tensor:
    """The last T of S tokens."""
    t, s = q_THK.shape[0], k_SHK.shape[0]
    q, k, v = (x.transpose(0, 1)[None] for x in (q_THK, k_SHK, v_SHV))
    if t == s:
        o = sdpa(q, k, v, is_causal=t > 1, scale=scale)
    else:
        mask = torch.ones(t, s, dtype=torch.bool, device=q.device).tril(s - t)
        o = sdpa(q, k, v, attn_mask=mask, scale=scale)
    return o[0].transpose(0, 1)


def _document_mask(segment_BL: Tensor) -> Tensor:
    length = segment_BL.shape[1]
    causal = torch.ones(length, length, dtype=torch.bool, device=segment_BL.device).tril()
    return (causal & (segment_BL[:, :, None] == segment_BL[:, None, :]))[:, None]


def mla_decode(
    q_NQHC: Tensor,
    latent_PSC: Tensor,
    table_NW: Tensor,
    length_N: Tensor,
    kv_lora_rank: int,
    scale: float,
    shared_PSR: Tensor | None = None,
    rate_PS: Tensor | None = None,
) -> Tensor:
    """The last Q tokens of N sequences, already in latent space, over their cached rows.

    `q_NQHC` [N, Q, H, C + R] is [W_UK^T q_nope | q_shared]. `latent_PSC` [P, S, C + R] is a pool of
    pages of S rows; row s of sequence n lies in page `table_NW[n, s // S]`, and there are
    `length_N[n]` of them, the Q tokens' own included: query j sees the first length - Q + 1 + j.
    Pages behind a length are never read, and a page of -1 has no rows. A query that sees none gets
    zeros. With `shared_PSR` [P, S, R] and `rate_PS` [P, S], `latent_PSC` [P, S, C] is what latents
    were rounded to after a division by their row's rate (fp8, say).

    Returns the mixed latents [N, Q, H, C], fp32 softmax.
    """
    o_NQHC = []
    for q_QHC, pages_W, length in zip(q_NQHC, table_NW, length_N.tolist(), strict=True):
        cached = _cached(latent_PSC, shared_PSR, rate_PS, pages_W, length)
        o_NQHC.append(_decoded(q_QHC, *cached, kv_lora_rank, scale))
    return torch.stack(o_NQHC) if o_NQHC else q_NQHC[..., :kv_lora_rank]


def _cached(
    latent_PSC: Tensor,
    shared_PSR: Tensor | None,
    rate_PS: Tensor | None,
    pages_W: Tensor,
    length: int,
) -> tuple[Tensor, Tensor]:
    """The rows [S, C + R] that there are of one sequence, and how many queries' tokens back from
    its end each lies [S]: 0 is the last."""
    size = latent_PSC.shape[1]
    length = min(length, len(pages_W) * size)
    back_S = torch.arange(length - 1, -1, -1, device=pages_W.device)
    pages_W = pages_W[: -(-length // size)].long()
    here_S = (pages_W >= 0).repeat_interleave(size)[:length]

    def rows(x_PS: Tensor) -> Tensor:
        return x_PS[pages_W.clamp(min=0)].flatten(0, 1)[:length][here_S]

    latent_SC = rows(latent_PSC)
    if shared_PSR is not None and rate_PS is not None:
        shared_SR, rate_S = rows(shared_PSR), rows(rate_PS)
        wide = torch.promote_types(torch.float32, shared_SR.dtype)
        c_SC = (latent_SC.to(wide) * rate_S[:, None]).to(shared_SR.dtype)
        latent_SC = torch.cat([c_SC, shared_SR], dim=1)
    return latent_SC, back_S[here_S]


def _decoded(
    q_QHC: Tensor, latent_SC: Tensor, back_S: Tensor, kv_lora_rank: int, scale: float
) -> Tensor:
    dtype = torch.promote_types(torch.float32, q_QHC.dtype)
    ahead_Q = torch.arange(len(q_QHC) - 1, -1, -1, device=q_QHC.device)
    seen_QHS = (back_S >= ahead_Q[:, None])[:, None]
    scores_QHS = (q_QHC.to(dtype) @ latent_SC.to(dtype).t()) * scale
    # Of a query that sees nothing, every share is set to zero; until then they have to be numbers.
    some_QHS = seen_QHS.any(dim=-1, keepdim=True)
    p_QHS = torch.softmax(scores_QHS.masked_fill(~seen_QHS & some_QHS, -torch.inf), dim=-1)
    p_QHS = torch.where(some_QHS, p_QHS, 0.0).to(latent_SC.dtype)
    return p_QHS @ latent_SC[:, :kv_lora_rank]
