"""Random tiny models without near ties in their routing, and how logits are compared.

`pooled_batch` and `rank_run`, modules of this folder, are found under their plain names.
"""

from __future__ import annotations

import importlib.util
import math
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from torch import Tensor

from perilune.kernels.common.packing import Packing
from perilune.model.init import random_weights
from perilune.model.lone import LoneSequence
from perilune.model.model import Transformer
from perilune.model.moe import Router
from perilune.model.parse_config import parse_config

for _name in ("pooled_batch", "rank_run"):
    _found = importlib.util.spec_from_file_location(_name, Path(__file__).with_name(f"{_name}.py"))
    sys.modules[_name] = importlib.util.module_from_spec(_found)
    _found.loader.exec_module(sys.modules[_name])

SMALLEST_GAP = 1e-4
"""Right implementations choose different experts where biased scores lie closer than rounding."""


class Drawn(NamedTuple):
    model: Transformer
    ids_T: Tensor
    logits_TV: Tensor
    """One-shot prefill without a cache."""


class _Gap:
    """Smallest distance between the last expert chosen and the first one left out."""

    def __init__(self) -> None:
        self.smallest = math.inf

    def __call__(self, gate: Router, x: tuple[Tensor], _: Any) -> None:
        score_TE = torch.sigmoid(x[0].float() @ gate.weight.float().T)
        biased_TE = score_TE + gate.e_score_correction_bias
        ranked_TE = biased_TE.sort(dim=-1, descending=True).values
        active = gate.moe.num_experts_per_token
        if active < ranked_TE.shape[1]:
            gap_T = ranked_TE[:, active - 1] - ranked_TE[:, active]
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
    gates = [module for module in model.modules() if isinstance(module, Router)]
    gaps = [_Gap() for _ in gates]
    hooks = [gate.register_forward_hook(gap) for gate, gap in zip(gates, gaps, strict=True)]
    logits_TV = model(ids_T, Packing.of([len(ids_T)]))
    for hook in hooks:
        hook.remove()
    return logits_TV, min((gap.smallest for gap in gaps), default=math.inf)


@pytest.fixture(scope="session")
def in_pieces() -> Callable[[Drawn, list[int]], np.ndarray]:
    """Logits [T, V] of a frozen model that reads `lengths` tokens at a time, single ones as it
    decodes."""

    @torch.inference_mode()
    def in_pieces(drawn: Drawn, lengths: list[int]) -> np.ndarray:
        sequence = LoneSequence(drawn.model.freeze())
        outputs = [
            sequence.decode(piece) if len(piece) == 1 else sequence.prefill(piece, len(piece))
            for piece in drawn.ids_T.split(lengths)
        ]
        assert sequence.length == len(drawn.ids_T)
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
