"""A model shared by GPUs against the CPU: mixed steps, graphs, the same bits on all.

`PYTHONPATH=src python3 tests/gpu/ranks.py [--ranks N] [--device cpu]`, on a machine with N GPUs; on
a CPU without graphs. The exit status is 1 where a check failed on any rank.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing
from steps import LENGTHS, check_graph, drawn, gap, mixed_run
from torch import Tensor

from perilune.model.api import load_model
from perilune.model.init import random_weights
from perilune.model.model import Transformer
from perilune.model.parse_config import parse_config
from perilune.model.presets import tiny_k3
from perilune.model.ranks import Ranks, meet
from perilune.model.save import save_checkpoint

LIMITS = {"float32": 1e-3, "bfloat16": 0.05}
"""Of the largest logit. In bf16, on a CPU, a model of one process is 0.013 from fp32."""
DIFFERENCES = {
    "float32": {},
    # Near ties would choose other experts: here all are chosen. And AttnRes amplifies roundings.
    "bfloat16": {
        "num_experts_per_token": 32,
        "num_hidden_layers": 4,
        "attn_res_block_size": None,
    },
}
SIZES = {
    "vocab_size": 1024,
    "hidden_size": 256,
    "num_hidden_layers": 8,
    "intermediate_size": 768,
    "num_attention_heads": 8,
    "q_lora_rank": 128,
    "kv_lora_rank": 128,
    "qk_nope_head_dim": 64,
    "qk_rope_head_dim": 32,
    "v_head_dim": 64,
    "num_experts": 32,
    "num_experts_per_token": 4,
    "moe_intermediate_size": 160,
    "routed_expert_hidden_size": 160,
    "linear_attn": {"num_heads": 8, "head_dim": 64},
}


class Table:
    """Of one rank; the first prints."""

    def __init__(self, rank: int) -> None:
        self._rank = rank
        self.failed = 0

    def add(self, name: str, value: Any, ok: bool) -> None:
        self.failed += not ok
        if self._rank == 0 or not ok:
            word = "ok" if ok else "FAILED"
            print(f"rank {self._rank}  {name:50} {value!s:>12}  {word}", flush=True)


def run(rank: int, size: int, device_type: str, folder: Path) -> None:
    device = torch.device(device_type, rank) if device_type == "cuda" else torch.device("cpu")
    if device_type == "cuda":
        torch.cuda.set_device(device)
    ranks, table = meet(rank, size, folder / "store", device), Table(rank)
    for dtype in LIMITS if device_type == "cuda" else ("float32",):
        want = mixed_run(load_model(folder / dtype).model, drawn(900, 7), LENGTHS, False)
        model = load_model(folder / dtype, str(device), dtype, ranks=ranks).model
        got = mixed_run(model, drawn(900, 7), LENGTHS, False)
        worst = max(gap(a.cpu(), b) for a, b in zip(got.logits, want.logits, strict=True))
        table.add(f"{dtype}: logits of mixed steps", f"{worst:.1e}", worst <= LIMITS[dtype])
        pools = got.together.pools
        alike = [alike_everywhere(ranks, x) for x in (*got.logits, pools.rows_LPBC.nan_to_num(9))]
        table.add(f"{dtype}: the same bits on all ranks", sum(alike), all(alike))
        if device_type == "cuda":
            check_graph(table.add, dtype, model)
    dist.destroy_process_group()
    sys.exit(bool(table.failed))


def alike_everywhere(ranks: Ranks, x: Tensor) -> bool:
    others = [torch.empty_like(x) for _ in range(ranks.size)]
    dist.all_gather(others, x.contiguous())
    return all(torch.equal(other, x) for other in others)


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        for dtype, differences in DIFFERENCES.items():
            config = parse_config(tiny_k3(mxfp4=True, **(SIZES | differences)))
            model = random_weights(Transformer(config), torch.Generator().manual_seed(5))
            save_checkpoint(model, folder / dtype)
        try:
            # Where one rank fails it ends the others, which may wait for that one.
            torch.multiprocessing.spawn(run, (args.ranks, args.device, folder), nprocs=args.ranks)
        except torch.multiprocessing.ProcessExitedException:
            return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
