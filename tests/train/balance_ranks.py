"""Two ranks, each a process, that balance two layers: `python balance_ranks.py FOLDER`.

Every rank leaves the biases that it came to by each rule, and what it sent; and a process without
ranks the biases that it comes to alone.
"""

from __future__ import annotations

import sys
from collections import Counter
from pathlib import Path

import torch
import torch.distributed as dist
from forked_ranks import forked

from perilune.model.moe import MoE
from perilune.model.parse_config import parse_config
from perilune.model.presets import tiny_k3
from perilune.model.ranks import meet
from perilune.train.balance.balancing import Balancing
from perilune.train.config import BalanceConfig

STEPS, TOKENS, SIZE = 3, 300, 2
RULES = ("quantile", "sign")


def biases(rule: str, share: slice, summed=lambda counts: counts) -> torch.Tensor:
    """Step by step, and the statistics, of `TOKENS` of which `share` are this rank's, 70 at a time;
    some are padding."""
    config = parse_config(tiny_k3())
    generator = torch.Generator().manual_seed(1)
    layers = [MoE(config, config.moe) for _ in range(2)]
    for p in (p for layer in layers for p in layer.parameters()):
        torch.nn.init.normal_(p, std=0.3, generator=generator)
    balancing, found = Balancing(layers, BalanceConfig(rule=rule), summed), []
    for _ in range(STEPS):
        x_TD = torch.randn(TOKENS, config.hidden_size, generator=generator)
        is_real_T = torch.rand(TOKENS, generator=generator) < 0.8
        for x, is_real in zip(x_TD[share].split(70), is_real_T[share].split(70), strict=True):
            with balancing.counting(is_real), torch.no_grad():
                for layer in layers:
                    layer(x)
        stats = balancing.update()
        row = [layer.gate.e_score_correction_bias.double() for layer in layers]
        found.append(torch.cat([*row, torch.stack([value.double() for value in stats])]))
    return torch.stack(found)


def main(folder: Path, rank: int) -> None:
    ranks = meet(rank, SIZE, folder / "store", torch.device("cpu"))
    sent: Counter[str] = Counter()

    def summed(counts: torch.Tensor) -> torch.Tensor:
        sent[str(counts.dtype)] += 1
        return ranks.sum(counts)

    # Not equal parts: the first rank has 110 tokens.
    share = slice(110) if rank == 0 else slice(110, None)
    found = {rule: biases(rule, share, summed) for rule in RULES}
    torch.save((found, dict(sent)), folder / f"{rank}")
    dist.destroy_process_group()


if __name__ == "__main__":
    folder = Path(sys.argv[1])
    failed = forked(SIZE, main, folder)
    torch.save({rule: biases(rule, slice(None)) for rule in RULES}, folder / "alone")
    sys.exit(failed)
