"""The processes that train one model together, each on its own rows of every batch."""

from __future__ import annotations

import os
import sys
from collections.abc import Generator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from perilune.core.env import launched
from perilune.core.errors import ConfigError


@dataclass(frozen=True, kw_only=True)
class Team:
    """This process among the others. Every rank has to make the same calls in the same order."""

    rank: int = 0
    size: int = 1
    all: DeviceMesh | None = None
    """Of all ranks; None: there is only this one."""
    experts: DeviceMesh | None = None
    """"shard" x "experts": ranks along the second share out the experts, those along the first
    cut what each of them has once more."""

    @property
    def expert_ranks(self) -> int:
        return 1 if self.experts is None else self.experts.size(1)

    def sum(self, x: Tensor) -> Tensor:
        """The sum over the ranks, in the place of x."""
        if self.size > 1:
            dist.all_reduce(x)
        return x

    def max(self, x: Tensor) -> Tensor:
        """The elementwise maximum over the ranks, in the place of x."""
        if self.size > 1:
            dist.all_reduce(x, op=dist.ReduceOp.MAX)
        return x

    def any(self, flag: bool, device: str) -> bool:
        """Whether it is so on any rank."""
        if self.size == 1:
            return flag
        return bool(self.sum(torch.tensor(float(flag), device=device)))

    def wait(self) -> None:
        """Returns when every rank has come here."""
        if self.size > 1:
            dist.barrier()

    def rows(self, num_rows: int) -> slice:
        """This rank's rows of a batch."""
        each = num_rows // self.size
        return slice(self.rank * each, (self.rank + 1) * each)


ALONE = Team()


@contextmanager
def gathered(device: str, expert_ranks: int) -> Generator[Team]:
    """The team that torchrun launched, on `device` ("cpu": gloo, "cuda": NCCL, a GPU each).

    Raises:
        ConfigError: the experts cannot be shared out among so many.
    """
    rank, size, local_rank = launched()
    if expert_ranks < 1 or size % expert_ranks:
        raise ConfigError(f"expert_ranks is {expert_ranks}, which does not divide {size} ranks")
    if size == 1:
        yield ALONE
        return
    on_gpu = device.startswith("cuda")
    if on_gpu:
        torch.cuda.set_device(local_rank)
    else:
        # Gloo asks for the host's name otherwise, and may find no address.
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo" if sys.platform == "linux" else "lo0")
    dist.init_process_group(
        "nccl" if on_gpu else "gloo",
        device_id=torch.device("cuda", local_rank) if on_gpu else None,
    )
    try:
        kind = "cuda" if on_gpu else "cpu"
        shape = (size // expert_ranks, expert_ranks)
        yield Team(
            rank=rank,
            size=size,
            all=init_device_mesh(kind, (size,), mesh_dim_names=("all",)),
            experts=init_device_mesh(kind, shape, mesh_dim_names=("shard", "experts")),
        )
    finally:
        dist.destroy_process_group()
