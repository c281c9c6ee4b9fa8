"""Which optimiser moves a parameter: Muon matrices, AdamW the rest."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from perilune.model.kda import KDA
from perilune.model.mla import MLA
from perilune.train.config import OptimConfig
from perilune.train.muon import Muon


def is_matrix(name: str, p: Tensor) -> bool:
    """Muon's share: hidden matrices; embeddings, head, convolutions and queries are AdamW's."""
    if p.ndim < 2 or name.endswith(("embed_tokens.weight", "lm_head.weight")):
        return False
    return "conv1d" not in name and not name.endswith("res_proj.weight")


def head_blocks(model: nn.Module) -> dict[str, tuple[int, ...]]:
    """Rows of each head in the attention's maps to queries, keys and values (K3 report: per-head
    Muon), by the parameter's name.

    Of MLA's joint map out of the latent, a head's keys and its values are two blocks. What heads
    share (latents, shared key channels) and what follows attention (gate, output) stays whole.
    """
    found: dict[str, tuple[int, ...]] = {}
    for name, module in model.named_modules():
        if isinstance(module, KDA):
            for part in ("q_proj", "k_proj", "v_proj"):
                found[f"{name}.{part}.weight"] = (module.head_dim,)
        elif isinstance(module, MLA):
            query = "q_proj" if module.mla.q_lora_rank is None else "q_b_proj"
            found[f"{name}.{query}.weight"] = (module.mla.qk_head_dim,)
            keys_and_values = (module.mla.qk_nope_head_dim, module.mla.v_head_dim)
            found[f"{name}.kv_b_proj.weight"] = keys_and_values
    return found


def build_optimizers(model: nn.Module, config: OptimConfig) -> list[torch.optim.Optimizer]:
    """One optimiser a kind; norms, biases and pseudo-queries are not decayed."""
    blocks = head_blocks(model) if config.muon_per_head else {}
    matrices: dict[tuple[int, ...], list[Tensor]] = {(): []}
    decayed, plain = [], []
    for name, p in model.named_parameters():
        if is_matrix(name, p):
            matrices.setdefault(blocks.get(name, ()), []).append(p)
        elif p.ndim >= 2 and not name.endswith("res_proj.weight"):
            decayed.append(p)
        else:
            plain.append(p)
    muon_groups = [{"params": params, "blocks": cut} for cut, params in matrices.items()]
    groups = [
        {"params": decayed, "weight_decay": config.weight_decay},
        {"params": plain, "weight_decay": 0.0},
    ]
    lr = config.peak_lr
    return [
        Muon(muon_groups, lr, config.muon_momentum, config.weight_decay),
        torch.optim.AdamW(groups, lr=lr, betas=config.adam_betas, foreach=True),
    ]
