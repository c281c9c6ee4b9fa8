"""Multi-head latent attention without positions: expanded for prefill, absorbed for decode.

Legend: T packed tokens, B rows, L tokens of a row, S cached tokens, H heads, K query width
(nope + shared), V value width, C latent width, R shared key channels.
Source: Kimi K3 report Eq. 7; absorbed form: DeepSeek-V2 (arXiv 2405.04434), section 2.1.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention as sdpa

from perilune.kernels.common.packing import Packing


def mla_prefill(
    q_THK: Tensor, k_THK: Tensor, v_THV: Tensor, packing: Packing, scale: float
) -> Tensor:
    """Causal attention of each sequence (each document, in segmented rows) with itself."""
    if packing.segment_BL is not None:
        mask = _document_mask(packing.segment_BL)
        q, k, v = (packing.to_rows(x).transpose(1, 2) for x in (q_THK, k_THK, v_THV))
        o = sdpa(q, k, v, attn_mask=mask, scale=scale)
        return packing.from_rows(o.transpose(1, 2))
    outputs = []
    for q, k, v in zip(*(x.split(packing.lengths) for x in (q_THK, k_THK, v_THV)), strict=True):
        outputs.append(mla_extend(q, k, v, scale))
    return outputs[0] if len(outputs) == 1 else torch.cat(outputs)


def mla_extend(q_THK: Tensor, k_SHK: Tensor, v_SHV: Tensor, scale: float) -> Tensor:
    """The last T of S tokens attend to everything up to themselves (chunked prefill)."""
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
