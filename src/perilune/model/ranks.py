"""One model on the GPUs of a host: what each rank holds, and the two joints of a layer.

Legend: T tokens, O outputs of all ranks.

Heads, the widths of dense and shared MLPs, routed experts and the vocabulary's head are shared out
in equal parts, in the order of the ranks. The rest, the latents of MLA among it, every rank has
whole. All ranks run all tokens on the same numbers: what is joined has the same bits everywhere, so
that every router chooses alike and every latent page is a copy.
"""

from __future__ import annotations

import os
import sys
from dataclasses import dataclass, replace
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor

from perilune.core.errors import ConfigError
from perilune.model.config import ModelConfig


@dataclass(frozen=True, slots=True)
class Ranks:
    """This process among those that run the model together."""

    rank: int = 0
    size: int = 1
    group: dist.ProcessGroup | None = None
    """None: torch's default group. Every rank has to make the same calls in the same order."""

    def part(self, whole: int) -> range:
        """This rank's part of `whole` things, which `share_of` has found divisible."""
        each = whole // self.size
        return range(self.rank * each, (self.rank + 1) * each)

    def sum(self, x: Tensor) -> Tensor:
        """The sum of all ranks' x, in its place."""
        if self.size > 1:
            dist.all_reduce(x, group=self.group)
        return x

    def sums(self, *parts: Tensor) -> tuple[Tensor, ...]:
        """The sums of several tensors of one dtype in one call: below a megabyte a call costs what
        it costs, whatever it carries."""
        if self.size == 1:
            return parts
        joined = self.sum(torch.cat([x.flatten() for x in parts]))
        summed = joined.split([x.numel() for x in parts])
        return tuple(y.view(x.shape) for x, y in zip(parts, summed, strict=True))

    def handed_out(self, x: Tensor) -> Tensor:
        """What the first rank has in x, in the place of everybody's."""
        if self.size > 1:
            dist.broadcast(x, 0, group=self.group)
        return x

    def joined(self, x_TO: Tensor) -> Tensor:
        """All ranks' outputs side by side."""
        if self.size == 1:
            return x_TO
        parts = [torch.empty_like(x_TO) for _ in range(self.size)]
        dist.all_gather(parts, x_TO.contiguous(), group=self.group)
        return torch.cat(parts, dim=-1)


ALONE = Ranks()


def meet(rank: int, size: int, file: Path, device: torch.device) -> Ranks:
    """Joins the others, who meet at `file`, on a disk of this host: by NCCL on GPUs, else by gloo.
    Waits until all are there; `torch.distributed.destroy_process_group` ends it."""
    # Gloo asks for the host's name otherwise, and may find no address.
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo" if sys.platform == "linux" else "lo0")
    on_gpu = device.type == "cuda"
    dist.init_process_group(
        "nccl" if on_gpu else "gloo",
        store=dist.FileStore(str(file), size),
        rank=rank,
        world_size=size,
        device_id=device if on_gpu else None,
    )
    return Ranks(rank, size)


def share_of(config: ModelConfig, ranks: Ranks) -> ModelConfig:
    """`config` with the heads and the width of dense layers that one rank has.

    Raises:
        ConfigError: the ranks cannot have equal parts.
    """
    kda, mla, moe = config.kda, config.mla, config.moe
    parts = {
        "KDA heads": kda.num_heads,
        "MLA heads": mla.num_heads,
        "intermediate_size": config.intermediate_size,
        "vocab_size": config.vocab_size,
    }
    if moe is not None:
        parts["experts"] = moe.num_experts
        parts["width of the shared experts"] = moe.num_shared_experts * moe.intermediate_size
    for name, whole in parts.items():
        if whole % ranks.size:
            raise ConfigError(f"{ranks.size} ranks cannot have equal parts of {whole} ({name})")
    return replace(
        config,
        intermediate_size=len(ranks.part(config.intermediate_size)),
        kda=replace(kda, num_heads=len(ranks.part(kda.num_heads))),
        mla=replace(mla, num_heads=len(ranks.part(mla.num_heads))),
    )
