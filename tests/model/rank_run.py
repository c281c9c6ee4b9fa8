"""Several ranks, each a process: `python rank_run.py FOLDER SIZE`.

The folder has checkpoints; beside each goes what every rank computed on it and what it holds.
"""

from __future__ import annotations

import os
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from pooled_batch import Batch, Held
from torch import Tensor

from perilune.model.load import load_checkpoint
from perilune.model.make_step import make_step
from perilune.model.model import Transformer
from perilune.model.moe import Router
from perilune.model.ranks import ALONE, Ranks, meet
from perilune.model.step import PAGE, Cut, Decoding

TOKENS = PAGE + 30
TEXTS = torch.randint(0, 128, (3, TOKENS), generator=torch.Generator().manual_seed(8))
DRAFTS = 3


def loaded(directory: Path, ranks: Ranks = ALONE) -> Transformer:
    keep_packed = directory.name.endswith("packed")
    return load_checkpoint(directory, keep_packed=keep_packed, ranks=ranks).model


@torch.inference_mode()
def run(model: Transformer) -> dict[str, Any]:
    """Chunks of many tokens and of one, with a cut, beside sequences that decode; drafts verified
    and some of them accepted."""
    routes: list[Tensor] = []
    for module in model.modules():
        if isinstance(module, Router):
            module.register_forward_hook(lambda _, __, found: routes.extend(found))
    batch = Batch(model.freeze(), slots=6, pages=8)
    few, many, late = (batch.open(ids_T) for ids_T in TEXTS)
    checkpoint = batch.free_slots.pop()
    batch.run([], [(few, 2, [])])
    batch.run([few], [(many, PAGE + 9, [Cut(40, checkpoint)])])
    batch.run([few, many], [(late, 1, [])], padded_to=3)
    batch.run([late, few, many])
    drafted = verify_and_accept(batch, [few, many], keep=[1, 3])
    return {
        "logits": [torch.stack([*s.logits.values()]) for s in (few, many, late)] + [drafted],
        "state": batch.pools.state_LSHKV,
        "window": batch.pools.window_LSWC,
        "rows": batch.pools.rows_LPBC,
        "routes": routes,
        "weights": model.state_dict(),
        "late": late.slot,
    }


def verify_and_accept(batch: Batch, sequences: list[Held], keep: list[int]) -> Tensor:
    decoding = [
        Decoding(s.slot, s.pages, s.done + DRAFTS)
        for s in sequences
        if batch.reserve(s, s.done + DRAFTS) is None
    ]
    step = make_step(batch.pools.limits, decoding, num_each=DRAFTS, verify=True)
    ids_T = torch.cat([s.ids_T[s.done : s.done + DRAFTS] for s in sequences])
    verified = batch.model.verify(ids_T, batch.pools, step)
    batch.model.accept(verified, batch.pools, step, torch.tensor(keep))
    return verified.logits_RV


def main(folder: Path, rank: int, size: int) -> None:
    ranks = meet(rank, size, folder / "store", torch.device("cpu"))
    calls: Counter[str] = Counter()
    for name in ("all_reduce", "all_gather"):
        counted(name, calls)
    for directory in sorted(path for path in folder.iterdir() if path.is_dir()):
        calls.clear()
        found = run(loaded(directory, ranks))
        torch.save(found | {"calls": dict(calls)}, folder / f"{directory.name}.{rank}")
    dist.destroy_process_group()


def counted(name: str, calls: Counter[str]) -> None:
    call = getattr(dist, name)

    def counting(*args: Any, **options: Any) -> Any:
        calls[name] += 1
        return call(*args, **options)

    setattr(dist, name, counting)


def forked(folder: Path, size: int) -> list[int]:
    """Exit statuses of the ranks: forked, for importing torch takes longer than the rest."""
    children = []
    for rank in range(size):
        child = os.fork()
        if not child:
            main(folder, rank, size)
            os._exit(0)
        children.append(child)
    return [os.waitpid(child, 0)[1] for child in children]


if __name__ == "__main__":
    sys.exit(any(forked(Path(sys.argv[1]), int(sys.argv[2]))))
