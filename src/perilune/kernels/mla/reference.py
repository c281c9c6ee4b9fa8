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


def mla_decode(q_HC: Tensor, latent_SC: Tensor, kv_lora_rank: int, scale: float) -> Tensor:
    """One query a head, already in latent space, over one sequence's cache.

    `q_HC` [H, C + R] is [W_UK^T q_nope | q_shared]; `latent_SC` [S, C + R]. Returns the mixed
    latents [H, C], fp32 softmax.

    Raises:
        ValueError: the cache is empty.
    """
    if not len(latent_SC):
        raise ValueError("mla_decode needs at least one cached token to attend to")
    dtype = torch.promote_types(torch.float32, q_HC.dtype)
    scores_HS = (q_HC.to(dtype) @ latent_SC.to(dtype).t()) * scale
    p_HS = torch.softmax(scores_HS, dim=-1).to(latent_SC.dtype)
    return p_HS @ latent_SC[:, :kv_lora_rank]
