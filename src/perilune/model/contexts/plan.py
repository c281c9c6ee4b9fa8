"""Which sizes are measured, in the order of what matters most.

Three stacks of four layers: K3's own (three KDA, one MLA), all of MLA, and all of grouped queries.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

from perilune.core.errors import ConfigError
from perilune.model.config import ModelConfig
from perilune.model.sizes import CacheSizes, cache_sizes

HYBRID, ALL_MLA, GQA = STACKS = ("hybrid", "mla", "gqa")
NUM_LAYERS = 4
PREFILL_CHUNK = 8192


class Case(NamedTuple):
    stack: str
    context: int
    num_sequences: int
    """0: one sequence's prefill, in chunks."""

    @property
    def is_prefill(self) -> bool:
        return self.num_sequences == 0

    @property
    def name(self) -> str:
        what = "prefill" if self.is_prefill else f"N{self.num_sequences}"
        return f"{self.stack}_L{self.context}_{what}"


def first_layer(config: ModelConfig) -> int:
    """Of three KDA layers and one of MLA, all with experts, next to the middle of the model.

    Raises:
        ConfigError: there are none.
    """
    pattern = [False] * (NUM_LAYERS - 1) + [True]
    found = [
        first
        for first in range(config.num_layers - NUM_LAYERS + 1)
        if [config.is_mla(first + i) for i in range(NUM_LAYERS)] == pattern
        and all(config.is_moe(first + i) for i in range(NUM_LAYERS))
    ]
    if not found:
        raise ConfigError("the model has no three KDA layers and one of MLA, all with experts")
    return min(found, key=lambda first: abs(2 * first + NUM_LAYERS - config.num_layers))


def stack_config(config: ModelConfig, stack: str) -> ModelConfig:
    """Of the four layers alone; the yardstick's is the hybrid's, whose sizes tell its own."""
    mla_layers = range(NUM_LAYERS) if stack == ALL_MLA else (NUM_LAYERS - 1,)
    return replace(config, num_layers=NUM_LAYERS, mla_layers=tuple(mla_layers))


def sizes_of(config: ModelConfig, context: int) -> CacheSizes:
    """As `perilune model info` computes them, of the hybrid stack: all three are in it."""
    return cache_sizes(stack_config(config, HYBRID), context)


def cache_bytes(config: ModelConfig, stack: str, context: int) -> int:
    """Of one sequence."""
    sizes = sizes_of(config, context)
    return {HYBRID: sizes.total, ALL_MLA: sizes.all_mla, GQA: sizes.gqa}[stack]


def capacity(config: ModelConfig, stack: str, context: int, num_bytes: int) -> int:
    """Sequences that fit."""
    return num_bytes // cache_bytes(config, stack, context)


def planned(
    config: ModelConfig, contexts: Sequence[int], batches: Sequence[int], num_bytes: int
) -> list[Case]:
    """As many sequences as fit, and each batch where all three stacks hold it; the longest context
    comes first, then one prefill of it, then the rest: stack by stack, since weights are drawn
    anew for each.

    Raises:
        ConfigError: the model has no such layers.
    """
    first_layer(config)
    longest = max(contexts)
    cases: list[Case] = []
    for context in sorted(contexts):
        fit = {stack: capacity(config, stack, context, num_bytes) for stack in STACKS}
        same = [n for n in batches if n <= min(fit.values())]
        for stack, most in fit.items():
            counts = sorted({*same, most} - {0}, reverse=True)
            cases += [Case(stack, context, n) for n in counts]
    cases.append(Case(HYBRID, longest, 0))

    def order(case: Case) -> tuple[int, int]:
        late = 1 if case.is_prefill else 2 * (case.context != longest)
        return late, STACKS.index(case.stack)

    return sorted(cases, key=order)
