"""FlashMLA as a peer: its dense decode for Hopper, over pages of 64 rows, metadata made once."""

from __future__ import annotations

from importlib import import_module
from typing import Any

import torch
from torch import Tensor

from perilune.core.errors import UnsupportedError
from perilune.kernels.bench.cases import Bound, Peer
from perilune.kernels.registry import Inputs

PAGE = 64

FLASH_MLA = Peer(
    name="FlashMLA",
    distribution="flash_mla",
    module="flash_mla",
    bind=f"{__name__}:flash_mla",
)


def flash_mla(inputs: Inputs, backward: bool) -> Bound:
    """One sequence of whole pages, in order."""
    module = import_module("flash_mla")
    q_HC, latent_SC = inputs["q_HC"], inputs["latent_SC"]
    (heads, width), tokens = q_HC.shape, latent_SC.shape[0]
    if tokens % PAGE:
        raise UnsupportedError(f"{tokens} tokens are no whole pages of {PAGE}")
    pages = tokens // PAGE
    on_device = {"dtype": torch.int32, "device": q_HC.device}
    length_N = torch.tensor([tokens], **on_device)
    metadata, num_splits = module.get_mla_metadata(length_N, heads, 1)
    arguments = {
        "q": q_HC[None, None],
        "k_cache": latent_SC.view(pages, PAGE, 1, width),
        "block_table": torch.arange(pages, **on_device)[None],
        "cache_seqlens": length_N,
        "head_dim_v": inputs["kv_lora_rank"],
        "tile_scheduler_metadata": metadata,
        "num_splits": num_splits,
        "softmax_scale": inputs["scale"],
    }
    return Bound(lambda: module.flash_mla_with_kvcache(**arguments), _mixed)


def _mixed(out: Any) -> list[Tensor]:
    o_11HC, _ = out
    return [o_11HC[0, 0]]
