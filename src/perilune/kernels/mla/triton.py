"""Absorbed decoding on a GPU, without gradients.

Legend: N sequences, Q query tokens of each, H heads, C latent width, R shared key channels, P pages
of S rows, W pages a sequence may have.
"""

from __future__ import annotations

import torch
from torch import Tensor

from perilune.kernels.common.row_major import row_major
from perilune.kernels.mla import reference
from perilune.kernels.mla.triton_decode import attend
from perilune.kernels.mla.triton_decode_rows import Rows

MAX_RANK, MAX_SHARED = 512, 64
"""Channels of a row whose tile fits beside the queries."""
ROUNDED = (torch.float8_e4m3fn,)
"""What latents may be stored as beside the queries' own dtype."""


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
    """As `reference.mla_decode`; whatever `serves` says no to runs the reference."""
    if not serves(q_NQHC, latent_PSC, kv_lora_rank, shared_PSR, rate_PS):
        inputs = (q_NQHC, latent_PSC, table_NW, length_N, kv_lora_rank, scale)
        return reference.mla_decode(*inputs, shared_PSR, rate_PS)
    if q_NQHC.numel() == 0:
        return q_NQHC.new_empty(*q_NQHC.shape[:3], kv_lora_rank)
    latent_PSC = row_major(latent_PSC)
    c_PSC, r_PSR = latent_PSC, shared_PSR
    if r_PSR is None:
        c_PSC, r_PSR = latent_PSC[..., :kv_lora_rank], latent_PSC[..., kv_lora_rank:]
    table_NW, length_N = table_NW.int().contiguous(), length_N.int().contiguous()
    rows = Rows(c_PSC, row_major(r_PSR), rate_PS, table_NW, length_N)
    return attend(row_major(q_NQHC), rows, scale)


def serves(
    q_NQHC: Tensor,
    latent_PSC: Tensor,
    kv_lora_rank: int,
    shared_PSR: Tensor | None = None,
    rate_PS: Tensor | None = None,
) -> bool:
    """Inference in bf16 or fp32, with rows of the same dtype, or latents in fp8, that fit: K3's
    have 512 and 64 channels."""
    graded = torch.is_grad_enabled() and (q_NQHC.requires_grad or latent_PSC.requires_grad)
    width = q_NQHC.shape[3]
    if shared_PSR is None:
        same = latent_PSC.dtype == q_NQHC.dtype and latent_PSC.shape[2] == width
    else:
        split = (latent_PSC.shape[2], shared_PSR.shape[2]) == (kv_lora_rank, width - kv_lora_rank)
        rounded = latent_PSC.dtype in ROUNDED and rate_PS is not None
        same = shared_PSR.dtype == q_NQHC.dtype and split and rounded
    known = q_NQHC.dtype in (torch.bfloat16, torch.float32)
    rows_fit = 0 < kv_lora_rank <= MAX_RANK and 0 < width - kv_lora_rank <= MAX_SHARED
    return not graded and same and known and rows_fit and latent_PSC.numel() > 0
