"""Random tiny models without near ties in their routing, and how logits are compared."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from perilune.kernels.common.packing import Packing
from perilune.kernels.router.reference import Routes
from perilune.model.init import random_weights
from perilune.model.model import Transformer
from perilune.model.moe import MoE
from perilune.model.parse_config import parse_config

SMALLEST_GAP = 1e-4
"""Right implementations choose different experts where biased scores lie closer than rounding."""


class Drawn(NamedTuple):
    model: Transformer
    ids_T: Tensor
    logits_TV: Tensor
    """One-shot prefill without a cache."""


class _Gap(nn.Module):
    """Smallest distance between the last expert chosen and the first one left out."""

    def __init__(self, num_active: int) -> None:
        super().__init__()
        self.num_active, self.smallest = num_active, math.inf

    def forward(self, routes: Routes, bias_E: Tensor) -> None:
        ranked_TE = (routes.score_TE + bias_E).sort(dim=-1, descending=True).values
        if self.num_active < ranked_TE.shape[1]:
            gap_T = ranked_TE[:, self.num_active - 1] - ranked_TE[:, self.num_active]
            self.smallest = min(self.smallest, float(gap_T.min()))


@pytest.fixture(scope="session")
def draw() -> Callable[..., Drawn]:
    """A random fp32 model of `raw` and `tokens` ids; drawn again while the routing nearly ties.

    `rounded`: weights rounded to bf16, as in a checkpoint; few tokens then run on weights held as
    bf16.
    """

    def draw(
        raw: dict[str, Any], tokens: int, seed: int, *, gain: float = 0.8, rounded: bool = False
    ) -> Drawn:
        config = parse_config(raw)
        for attempt in range(40):
            generator = torch.Generator().manual_seed(1000 * seed + attempt)
            model = random_weights(Transformer(config), generator, gain)
            if rounded:
                model = model.bfloat16().float()
            ids_T = torch.randint(0, config.vocab_size, (tokens,), generator=generator)
            logits_TV, gap = _run(model, ids_T)
            if gap > SMALLEST_GAP:
                return Drawn(model, ids_T, logits_TV)
        raise AssertionError(f"every draw of {raw} nearly ties")

    return draw


@torch.no_grad()
def _run(model: Transformer, ids_T: Tensor) -> tuple[Tensor, float]:
    layers = [module for module in model.modules() if isinstance(module, MoE)]
    gaps = [_Gap(layer.gate.moe.num_experts_per_token) for layer in layers]
    for layer, gap in zip(layers, gaps, strict=True):
        layer.observe = gap
    logits_TV = model(ids_T, Packing.of([len(ids_T)]))
    for layer in layers:
        layer.observe = None
    return logits_TV, min((gap.smallest for gap in gaps), default=math.inf)


@pytest.fixture(scope="session")
def in_pieces() -> Callable[[Drawn, list[int]], np.ndarray]:
    """Logits [T, V] of a frozen model that reads `lengths` tokens at a time into one cache."""

    @torch.inference_mode()
    def in_pieces(drawn: Drawn, lengths: list[int]) -> np.ndarray:
        model = drawn.model.freeze()
        cache = model.new_cache()
        outputs = [
            model(piece, Packing.of([len(piece)]), [cache]) for piece in drawn.ids_T.split(lengths)
        ]
        assert cache.length == len(drawn.ids_T)
        return torch.cat(outputs).numpy()

    return in_pieces


@pytest.fixture(scope="session")
def spread() -> Callable[[np.ndarray, np.ndarray], float]:
    """max |difference| / max |logit|; infinite where the most likely token differs."""

    def spread(got: np.ndarray, want: np.ndarray) -> float:
        assert got.shape == want.shape
        assert np.isfinite(want).all()
        if (got.argmax(-1) != want.argmax(-1)).any() or not np.isfinite(got).all():
            return math.inf
        return float(np.abs(got - want).max() / np.abs(want).max())

    return spread
