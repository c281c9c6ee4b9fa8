"""What the programs of `cuda_decode.cu` compute, tile by tile, for tests without a GPU.

Legend: N sequences, Q query tokens, H heads, C channels of a row, S tokens of a tile. Pages hold
one tile.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from perilune.kernels.mla.cuda_decode import TOKENS
from perilune.kernels.registry import Inputs

FAR = 64.0


def decoded(inputs: Inputs, teams: int, *, far: float = FAR, others_share: bool = False) -> Tensor:
    """[N, Q, H, latent] in fp32. `others_share` fades what a new sum is added to by the wrong one
    of both shares."""
    q_NQHC, lengths = inputs["q_NQHC"].float(), inputs["length_N"].tolist()
    n, queries, heads, _ = q_NQHC.shape
    tiles = [(i, t) for i in range(n) for t in range(-(-lengths[i] // TOKENS))]
    quota = max(1, -(-len(tiles) // teams))
    shares = [tiles[first : first + quota] for first in range(0, len(tiles), quota)]
    o_NQHC = torch.zeros(n, queries, heads, inputs["kv_lora_rank"])
    for i in range(n):
        own = [[t for m, t in share if m == i] for share in shares]
        for j in range(queries):
            q_HC = q_NQHC[i, j] * (inputs["scale"] / math.log(2))
            seen = lengths[i] - queries + 1 + j
            parts = [_part(inputs, q_HC, i, seen, ts, far, others_share) for ts in own if ts]
            o_NQHC[i, j] = _merged(parts, o_NQHC[i, j])
    return o_NQHC


def _part(
    inputs: Inputs, q_HC: Tensor, n: int, seen: int, tiles: list[int], far: float, wrong: bool
) -> tuple[Tensor, Tensor]:
    """What one program makes of its tiles of sequence n, and the logarithm of the sum."""
    rank, heads = inputs["kv_lora_rank"], len(q_HC)
    kept = (torch.zeros(heads, rank), torch.full((heads,), -torch.inf))
    o_HC, total_H, top_H = torch.zeros(heads, rank), torch.zeros(heads), torch.zeros(heads)
    fresh, more = True, False
    for tile in tiles:
        page, here = int(inputs["table_NW"][n, tile]), min(seen - tile * TOKENS, TOKENS)
        if page < 0 or here <= 0:
            continue
        rows_SC = inputs["latent_PSC"][page, :here].float()
        score_HS = q_HC @ rows_SC.t()
        if not fresh and bool((score_HS - top_H[:, None] > far).any()):
            kept, more = _added(kept, o_HC, total_H, top_H, more, wrong), True
            o_HC, total_H, fresh = torch.zeros_like(o_HC), torch.zeros_like(total_H), True
        if fresh:
            top_H, fresh = score_HS.amax(1), False
        share_HS = torch.exp2(score_HS - top_H[:, None]).bfloat16().float()
        o_HC, total_H = o_HC + share_HS @ rows_SC[:, :rank], total_H + share_HS.sum(1)
    return _added(kept, o_HC, total_H, top_H, more, wrong)


def _added(
    kept: tuple[Tensor, Tensor],
    o_HC: Tensor,
    total_H: Tensor,
    top_H: Tensor,
    more: bool,
    wrong: bool,
) -> tuple[Tensor, Tensor]:
    own_H = top_H + torch.log2(total_H)
    o_HC = o_HC * torch.where(total_H > 0, 1 / total_H, 0.0)[:, None]
    if not more:
        return o_HC, own_H
    highest_H = torch.maximum(own_H, kept[1]).clamp(min=-3e38)
    a_H, b_H = torch.exp2(own_H - highest_H), torch.exp2(kept[1] - highest_H)
    sum_H = a_H + b_H
    faded_H = (a_H if wrong else b_H) / sum_H
    o_HC = o_HC * (a_H / sum_H)[:, None] + kept[0] * faded_H[:, None]
    return o_HC, highest_H + torch.log2(sum_H)


def _merged(parts: list[tuple[Tensor, Tensor]], nothing_HC: Tensor) -> Tensor:
    if not parts:
        return nothing_HC
    lse_PH = torch.stack([lse_H for _, lse_H in parts])
    weight_PH = torch.exp2(lse_PH - lse_PH.amax(0).clamp(min=-3e38))
    total_H = weight_PH.sum(0)
    weighed_HC = sum(w_H[:, None] * o_HC for w_H, (o_HC, _) in zip(weight_PH, parts, strict=True))
    return weighed_HC * torch.where(total_H > 0, 1 / total_H, 0.0)[:, None]
