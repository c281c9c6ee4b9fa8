"""A sequence with pools of its own: any chunks and single tokens, and pools that grow."""

from __future__ import annotations

import pytest
import torch

from perilune.kernels.common.packing import Packing
from perilune.model.init import random_weights
from perilune.model.lone import LoneSequence
from perilune.model.model import Transformer
from perilune.model.parse_config import parse_config
from perilune.model.presets import tiny_k3, tiny_kimi_linear
from perilune.model.step import PAGE

CLOSE = 1e-4
TOKENS = 3 * PAGE + 9
IDS = torch.randint(0, 128, (TOKENS,), generator=torch.Generator().manual_seed(8))
FAMILIES = {"k3": tiny_k3, "kimi_linear": tiny_kimi_linear}


@pytest.fixture(params=FAMILIES)
def model(request) -> Transformer:
    config = parse_config(FAMILIES[request.param](hidden_size=40, num_hidden_layers=4))
    return random_weights(Transformer(config), torch.Generator().manual_seed(6)).freeze()


@torch.inference_mode()
@pytest.mark.parametrize(
    "lengths", [[TOKENS], [1, 1, 1, 61, 1, 3, 40], [64, 1, 70, 2], [130, 1]], ids=str
)
def test_any_pieces_agree_with_one_forward_pass(model, lengths) -> None:
    """Pieces are prefilled and decoded in turn."""
    sequence, outputs = LoneSequence(model, capacity=1), []
    for i, ids_T in enumerate(IDS[: sum(lengths)].split(lengths)):
        pages = sequence.pools.limits.num_pages
        if i % 2:
            outputs.append(sequence.decode(ids_T))
        else:
            outputs.append(sequence.prefill(ids_T, len(ids_T)))
        grown = sequence.pools.limits.num_pages
        assert grown == pages or grown - 1 >= 2 * (pages - 1)
    want_TV = model(IDS[: sum(lengths)], Packing.of([sum(lengths)]))
    got_TV = torch.cat(outputs)
    assert sequence.length == sum(lengths)
    assert float((got_TV - want_TV).abs().max()) <= CLOSE * float(want_TV.abs().max())


@torch.inference_mode()
def test_only_the_last_logits_are_given_unless_more_are_asked_for(model) -> None:
    sequence = LoneSequence(model)
    assert sequence.prefill(IDS[:5]).shape == (1, 128)
    assert sequence.prefill(IDS[5:9], 0).shape == (0, 128)
    assert sequence.prefill(IDS[9:14], 3).shape == (3, 128)
