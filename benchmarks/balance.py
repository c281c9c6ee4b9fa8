"""How fast 896 experts, 16 a token, get even loads from a badly skewed router: rule by rule.

    python benchmarks/balance.py [--device cpu|cuda] [--sign-steps N] [--out FILE.json]

A router of K3's size, whose weights stay, chooses for tokens; after every step its bias moves by
the rule. Expert e's logits are c + o_e + a normal draw a token, o_e normal once. Some runs see the
same tokens in every step: then nothing but the rule decides where they end. A run with fresh tokens
in every step has the noise of a batch, too, about 4.5 over the root of the mean load. Beside FILE
goes a plot of the same name.

On a CPU, `torch.topk` chooses: the op's reference sorts all scores, which takes five times as long.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from report import keep, provenance
from torch import Tensor
from torch.nn import functional

from perilune.kernels.router.reference import Routes
from perilune.kernels.router.tally import Tally, add
from perilune.model.moe import MoE, Router
from perilune.model.parse_config import parse_config
from perilune.model.presets import tiny_k3
from perilune.train.balance.balancing import Balancing
from perilune.train.config import BalanceConfig

EXPERTS, ACTIVE, WIDTH, MICRO_BATCH = 896, 16, 64, 8192
EVEN = 0.1


@dataclass(frozen=True, kw_only=True)
class Run:
    balance: BalanceConfig
    steps: int
    tokens: int = 4096
    is_fresh: bool = False
    """Whether every step has tokens of its own."""
    centre: float = -2.0
    """c: most experts' scores of most tokens are low."""


def runs(sign_steps: int) -> dict[str, Run]:
    quantile = BalanceConfig(rule="quantile")
    # Scores around 1/2, many at 1, where hardly a bias tells tokens apart.
    saturated = {"steps": 20, "centre": 0.0}
    return {
        "quantile": Run(balance=quantile, steps=20),
        "quantile, 262,144 fresh tokens a step": Run(
            balance=quantile, steps=7, tokens=1 << 18, is_fresh=True
        ),
        "sign rule, step 0.001": Run(balance=BalanceConfig(rule="sign"), steps=sign_steps),
        "sign rule, step 0.01": Run(
            balance=BalanceConfig(rule="sign", sign_rate=0.01), steps=sign_steps
        ),
        "quantile, higher scores": Run(balance=quantile, **saturated),
        "quantile, higher scores, 10,000 bins": Run(
            balance=BalanceConfig(rule="quantile", bins=10_000), **saturated
        ),
    }


def layer(run: Run, generator: torch.Generator) -> MoE:
    """Whose router reads an expert's offset from the first channel, which is one for all tokens."""
    sizes = {"num_experts": EXPERTS, "num_experts_per_token": ACTIVE, "hidden_size": WIDTH}
    config = parse_config(tiny_k3(**sizes, moe_intermediate_size=1, num_shared_experts=1))
    moe = MoE(config, config.moe)
    with torch.no_grad():
        weight = moe.gate.weight.normal_(std=(WIDTH - 1) ** -0.5, generator=generator)
        weight[:, 0].normal_(mean=run.centre, generator=generator)
    return moe.train()


def batches(run: Run, generator: torch.Generator, device: str) -> Iterator[list[Tensor]]:
    """Micro-batches, step after step."""

    def drawn() -> list[Tensor]:
        parts = torch.empty(run.tokens, 0).split(MICRO_BATCH)
        x = [torch.randn(len(part), WIDTH, generator=generator) for part in parts]
        return [part.index_fill(1, torch.tensor([0]), 1.0).to(device) for part in x]

    batch = drawn()
    for step in range(run.steps):
        yield drawn() if run.is_fresh and step else batch


def route(gate: Router, x_TD: Tensor) -> Routes:
    if x_TD.is_cuda:
        return gate(x_TD)
    assert gate.balancer is not None
    return gate.balancer(functional.linear(x_TD, gate.weight), partial(best, gate))


def best(gate: Router, logits_TE: Tensor, tally: Tally | None) -> Routes:
    """As `gate` chooses, but among equal scores any."""
    score_TE, bias_E = torch.sigmoid(logits_TE), gate.e_score_correction_bias
    best_TR = (score_TE + bias_E).topk(ACTIVE + 1)
    expert_TR = best_TR.indices[:, :ACTIVE].contiguous()
    if tally is not None:
        add(tally, score_TE, best_TR.values[:, ACTIVE], expert_TR, bias_E)
    return Routes(expert_TR, score_TE.gather(1, expert_TR))


@torch.no_grad()
def violations(run: Run, device: str) -> list[float]:
    """MaxVio of every step, under the bias that the steps before it have left."""
    generator = torch.Generator().manual_seed(0)
    moe = layer(run, generator).to(device)
    balancing, found = Balancing([moe], run.balance), []
    for batch in batches(run, generator, device):
        for x_TD in batch:
            with balancing.counting(torch.ones(len(x_TD), dtype=torch.bool, device=device)):
                route(moe.gate, x_TD)
        found.append(balancing.update().max_violation)
    return torch.stack(found).tolist()


def measured(run: Run, device: str) -> dict[str, Any]:
    found = violations(run, device)
    uneven = [step for step, violation in enumerate(found, 1) if violation >= EVEN]
    even_from = uneven[-1] + 1 if uneven else 1
    return {
        **asdict(run),
        "even_from_step": even_from if even_from <= len(found) else None,
        "last": found[-1],
        "max_violation": [round(violation, 4) for violation in found],
    }


def draw(results: dict[str, dict[str, Any]], path: Path) -> None:
    figure = Figure(figsize=(8, 4.5), dpi=80, layout="constrained")
    axes = figure.subplots()
    for name, result in results.items():
        found = result["max_violation"]
        axes.plot(range(1, len(found) + 1), found, label=name, linewidth=1.2)
    axes.axhline(EVEN, color="#999999", linewidth=0.8, linestyle="--")
    axes.set_xscale("log")
    axes.set_yscale("log")
    axes.set_xlabel("step")
    axes.set_ylabel("MaxVio: largest load over the mean, minus 1")
    axes.set_title(f"{EXPERTS} experts, {ACTIVE} a token, from a badly skewed router", fontsize=10)
    figure.legend(fontsize=8, frameon=False, loc="outside lower center", ncols=3)
    axes.grid(color="#999999", alpha=0.3, linewidth=0.5)
    FigureCanvasAgg(figure).print_png(path)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--sign-steps", type=int, default=1000, metavar="N")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    results = {}
    for name, run in runs(args.sign_steps).items():
        results[name] = measured(run, args.device)
        print(f"{name}: even from step {results[name]['even_from_step']}", flush=True)
    keep({**provenance("torch"), "even_below": EVEN, "runs": results}, args.out)
    if args.out:
        draw(results, args.out.with_suffix(".png"))


if __name__ == "__main__":
    main()
