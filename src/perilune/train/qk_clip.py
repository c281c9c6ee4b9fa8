"""QK-Clip: heads whose attention logits grow too large are scaled down (Kimi K2, arXiv 2507.20534).

Legend: T packed tokens, B rows, L tokens of a row, H heads, K query width = N a head's own + R
shared key channels, V value width, C latent width.

A logit is (q_own . k_own + q_shared . k_shared) * scale. To make all of a head's logits g times as
large, q_own and k_own take sqrt(g) each; q_shared takes all of g, for k_shared belongs to every
head. All are rows of weights of that head alone: those of its queries, and the key rows of the map
out of the latent, which absorbed attention multiplies into the query, so that decoding sees the
same logits. What heads share (both latents, their norms, k_shared) stays as it is, and so does what
no logit depends on: values, the output gate, the output. KDA needs none of this: its queries and
keys have length one.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor, Replicate

from perilune.kernels.common.packing import Packing
from perilune.kernels.mla.reference import with_shared
from perilune.model.mla import MLA
from perilune.train.data import PADDING

SCORES = 1 << 26
"""Logits that are looked at together."""


def largest_logits(
    q_THK: Tensor, k_THN: Tensor, shared_TR: Tensor, packing: Packing, scale: float
) -> Tensor:
    """fp32 [H]: each head's largest logit over what attention sees; -inf where that is nothing.

    Padding sees nothing. In bf16 a logit is rounded once, to 2^-9 of itself.
    """
    segment_BL = packing.segment_BL
    assert segment_BL is not None, "training packs documents in rows"
    q_BHLK, k_BHLK = (
        packing.to_rows(x).transpose(1, 2) for x in (q_THK, with_shared(k_THN, shared_TR))
    )
    b, h, length, _ = q_BHLK.shape
    at_once = max(1, SCORES // (b * h * length))
    position_L = torch.arange(length, device=segment_BL.device)
    largest = []
    for first in range(0, length, at_once):
        part, seen = slice(first, first + at_once), slice(first + at_once)
        segment_BQ1 = segment_BL[:, part, None]
        sees_BQS = (segment_BQ1 == segment_BL[:, None, seen]) & (segment_BQ1 != PADDING)
        sees_BQS = sees_BQS & (position_L[part, None] >= position_L[seen])
        scores_BHQS = q_BHLK[:, :, part] @ k_BHLK[:, :, seen].mT
        scores_BHQS = scores_BHQS.masked_fill(~sees_BQS[:, None], -torch.inf)
        largest.append(scores_BHQS.amax((0, 2, 3)))
    return torch.stack(largest).amax(0).float() * scale


class LogitWatch:
    """The largest logits of a layer since they were last reset. To see one twice, as in a
    recomputed forward pass, changes nothing."""

    def __init__(self, num_heads: int, device: torch.device) -> None:
        self.largest_H = torch.full((num_heads,), -torch.inf, device=device)

    def __call__(
        self, q_THK: Tensor, k_THN: Tensor, shared_TR: Tensor, packing: Packing, scale: float
    ) -> None:
        q_THK, k_THN, shared_TR = (x.detach() for x in (q_THK, k_THN, shared_TR))
        found_H = largest_logits(q_THK, k_THN, shared_TR, packing, scale)
        self.largest_H.copy_(torch.maximum(self.largest_H, found_H))


class QKClip:
    """Watches the layers' logits in every forward pass of training; `clip` after the update."""

    def __init__(
        self,
        layers: Sequence[MLA],
        threshold: float,
        largest: Callable[[Tensor], Tensor] = lambda logits: logits,
    ) -> None:
        """`largest` is the elementwise maximum over the ranks whose tokens make up a step."""
        self.layers, self.threshold, self.largest = list(layers), threshold, largest
        self.watches = [LogitWatch(x.mla.num_heads, x.o_proj.weight.device) for x in self.layers]
        for layer, watch in zip(self.layers, self.watches, strict=True):
            layer.watch = watch

    @torch.no_grad()
    def clip(self) -> Tensor:
        """Scales every head down whose largest logit of this step is above the threshold, so that
        the same inputs would have the threshold; returns the largest of all, before that."""
        if not self.layers:
            return torch.tensor(-torch.inf)
        largest_LH = self.largest(torch.stack([watch.largest_H for watch in self.watches]))
        factor_LH = torch.where(largest_LH > self.threshold, self.threshold / largest_LH, 1.0)
        for layer, factor_H in zip(self.layers, factor_LH, strict=True):
            scale_heads(layer, factor_H)
        for watch in self.watches:
            watch.largest_H.fill_(-torch.inf)
        return largest_LH.max()


def scale_heads(layer: MLA, factor_H: Tensor) -> None:
    """Makes the logits of each head that many times as large."""
    mla = layer.mla
    query = layer.q_proj if mla.q_lora_rank is None else layer.q_b_proj
    root_H1, factor_H1 = factor_H.sqrt()[:, None], factor_H[:, None]
    own_HN = root_H1.expand(-1, mla.qk_nope_head_dim)
    values_HV = torch.ones_like(factor_H1).expand(-1, mla.v_head_dim)
    _scale_rows(query.weight, torch.cat([own_HN, factor_H1.expand(-1, mla.qk_rope_head_dim)], 1))
    _scale_rows(layer.kv_b_proj.weight, torch.cat([own_HN, values_HV], 1))


def _scale_rows(weight: Tensor, factor: Tensor) -> None:
    column = factor.reshape(-1, 1)
    if isinstance(weight, DTensor):
        mesh = weight.device_mesh
        column = DTensor.from_local(column, mesh, [Replicate()] * mesh.ndim, run_check=False)
    weight.mul_(column)
