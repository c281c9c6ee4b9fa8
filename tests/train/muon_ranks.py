"""Two ranks, each a process, that hold parts of parameters: `python muon_ranks.py FOLDER`.

Every rank leaves the whole parameters after a few steps, and the names of those that were gathered;
a process without ranks leaves what it comes to alone. So they do with attention whose heads are
scaled, as by QK-Clip.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from forked_ranks import forked
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

from perilune.model.mla import MLA
from perilune.model.parse_config import parse_config
from perilune.model.presets import tiny_k3
from perilune.model.ranks import meet
from perilune.train.muon import Muon
from perilune.train.qk_clip import scale_heads
from perilune.train.whole_blocks import WholeBlocks, own_part

SIZE, STEPS = 2, 3
# Shape, blocks, and the dimension that is shared out.
PARAMETERS: dict[str, tuple[tuple[int, ...], tuple[int, ...], int]] = {
    "whole": ((10, 6), (), 0),
    "tall": ((7, 5), (), 0),
    "heads": ((16, 6), (4,), 0),
    "cut_heads": ((12, 6), (4,), 0),
    "keys_and_values": ((20, 6), (3, 2), 0),
    "experts": ((4, 6, 5), (), 0),
    "experts_cut": ((3, 6, 5), (), 1),
}


def trained(place: Callable[[str, Tensor], Tensor]) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(1)
    params = {
        name: torch.nn.Parameter(place(name, torch.randn(shape, generator=generator)))
        for name, (shape, _, _) in PARAMETERS.items()
    }
    groups: list[dict[str, Any]] = [
        {"params": [p], "blocks": PARAMETERS[name][1]} for name, p in params.items()
    ]
    optimizer = Muon(groups, lr=0.02, momentum=0.9, weight_decay=0.1)
    for _ in range(STEPS):
        for name, p in params.items():
            p.grad = place(name, torch.randn(PARAMETERS[name][0], generator=generator))
        optimizer.step()
    return {name: p.detach() for name, p in params.items()} | scaled(place)


def scaled(place: Callable[[str, Tensor], Tensor]) -> dict[str, Tensor]:
    """Queries and keys of an attention whose heads were scaled."""
    generator = torch.Generator().manual_seed(2)
    layer = MLA(parse_config(tiny_k3()))
    linears = {"clip.queries": layer.q_b_proj, "clip.keys": layer.kv_b_proj}
    for name, linear in linears.items():
        whole = torch.randn(linear.weight.shape, generator=generator)
        linear.weight = torch.nn.Parameter(place(name, whole))
    with torch.no_grad():
        scale_heads(layer, torch.tensor([1.0, 0.5, 0.1, 1.0]))
    return {name: linear.weight.detach() for name, linear in linears.items()}


def main(folder: Path, rank: int) -> None:
    meet(rank, SIZE, folder / "store", torch.device("cpu"))
    mesh = init_device_mesh("cpu", (SIZE,))

    def place(name: str, x: Tensor) -> Tensor:
        dim = PARAMETERS[name][2] if name in PARAMETERS else 0
        return distribute_tensor(x, mesh, [Shard(dim)])

    params = trained(place)
    gathered = [
        name
        for name, (_, blocks, _) in PARAMETERS.items()
        if WholeBlocks(params[name], blocks).gathered(own_part(params[name])).shape
        == params[name].shape
    ]
    whole = {name: p.full_tensor() for name, p in params.items() if isinstance(p, DTensor)}
    torch.save({"params": whole, "gathered": sorted(gathered)}, folder / str(rank))
    dist.destroy_process_group()


if __name__ == "__main__":
    folder = Path(sys.argv[1])
    failed = forked(SIZE, main, folder)
    torch.save({"params": trained(lambda _, x: x)}, folder / "alone")
    sys.exit(failed)
