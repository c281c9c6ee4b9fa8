"""FlashMLA as a peer: its dense decode for Hopper, over pages of 64 rows, metadata made once."""

from __future__ import annotations

from importlib import import_module
from typing import Any

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
    module = import_module("flash_mla")
    q_NQHC, latent_PSC, length_N = inputs["q_NQHC"], inputs["latent_PSC"], inputs["length_N"]
    _, queries, heads, _ = q_NQHC.shape
    if latent_PSC.shape[1] != PAGE:
        raise UnsupportedError(f"pages of {latent_PSC.shape[1]} rows are no pages of {PAGE}")
    metadata, num_splits = module.get_mla_metadata(length_N, queries * heads, 1)
    arguments = {
        "q": q_NQHC,
        "k_cache": latent_PSC[:, :, None],
        "block_table": inputs["table_NW"],
        "cache_seqlens": length_N,
        "head_dim_v": inputs["kv_lora_rank"],
        "tile_scheduler_metadata": metadata,
        "num_splits": num_splits,
        "softmax_scale": inputs["scale"],
        "causal": queries > 1,
    }
    return Bound(lambda: module.flash_mla_with_kvcache(**arguments), _mixed)


def _mixed(out: Any) -> list[Tensor]:
    o_NQHC, _ = out
    return [o_NQHC]
