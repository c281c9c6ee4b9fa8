"""Cached rows in pages, drawn for checks and benchmarks.

Legend: N sequences, W pages a sequence may have, P pages of S rows, C channels.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from perilune.kernels.registry import Inputs

NO_PAGE = 1 << 30
"""Stands where a table must not be read."""


def paged(
    generator: torch.Generator,
    rows_RC: Tensor,
    lengths: Sequence[int],
    page: int,
    width: int | None = None,
) -> Inputs:
    """`rows_RC`, one sequence's after another's, in pages of no order, with NaN in every row that
    is nobody's; tables of `width` pages (None: what the longest needs)."""
    device = rows_RC.device
    needed = [-(-length // page) for length in lengths]
    width = max(1, *needed) if width is None else width
    num_pages = len(lengths) * width + 1
    order_P = torch.rand(num_pages, generator=generator, device=generator.device).argsort()
    table_NW = order_P[:-1].to(device, torch.int32).view(len(lengths), width)
    latent_PSC = rows_RC.new_full((num_pages, page, rows_RC.shape[1]), torch.nan)
    start = 0
    for pages_W, length, count in zip(table_NW, lengths, needed, strict=True):
        token_S = torch.arange(length, device=device)
        page_S = pages_W.long()[token_S // page]
        latent_PSC[page_S, token_S % page] = rows_RC[start : start + length]
        start += length
        pages_W[count:] = NO_PAGE
    length_N = torch.tensor(list(lengths), dtype=torch.int32, device=device)
    return {"latent_PSC": latent_PSC, "table_NW": table_NW, "length_N": length_N}


def rounded(latent_PSC: Tensor, rank: int) -> Inputs:
    """The latents of a pool as fp8, each row over its own rate, and the shared channels beside.

    A normalised latent needs no finer rate: 448 of e4m3 is its largest number, and numbers down to
    a 30,000th of that keep three bits behind the leading one.
    """
    c_PSC, shared_PSR = latent_PSC[..., :rank].float(), latent_PSC[..., rank:]
    largest = torch.finfo(torch.float8_e4m3fn).max
    rate_PS = (c_PSC.abs().amax(dim=-1) / largest).clamp(min=torch.finfo(torch.float32).tiny)
    c_PSC = (c_PSC / rate_PS[..., None]).to(torch.float8_e4m3fn)
    return {"latent_PSC": c_PSC, "shared_PSR": shared_PSR.contiguous(), "rate_PS": rate_PS}
