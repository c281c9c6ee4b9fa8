"""`perilune bench prefix-cache`: a trace's prompts through the prefix cache, beside ideal ones."""

from __future__ import annotations

import argparse
from collections.abc import Iterable, Iterator, Sequence
from itertools import islice
from pathlib import Path
from typing import NamedTuple

import numpy as np

from perilune.core.errors import ConfigError
from perilune.engine.cost_model import CostModel
from perilune.engine.prefix_cache import ALPHA
from perilune.engine.prefix_replay import Replayed, replay
from perilune.engine.retention import Retention
from perilune.gateway.load.prefix_oracle import IdealHits, ideal_hits
from perilune.gateway.load.traces import BLOCK_TOKENS, TracedRequest, read_trace
from perilune.gateway.load.workload import Block
from perilune.model.config import ModelConfig
from perilune.model.parse_config import load_config
from perilune.model.pools import PAGE
from perilune.model.presets import preset


def run(args: argparse.Namespace) -> int:
    """Raises:
    ConfigError: a capacity that holds nothing, or a trace that tells no prompt's contents.
    """
    cost = CostModel.of(_config(args.model))
    requests = list(islice(read_trace(args.trace), args.requests))
    if not all(request.block_ids for request in requests):
        raise ConfigError(f"{args.trace} does not tell which prompts share what")
    retention = Retention(interval=args.interval, align=args.align, max_cuts=args.max_cuts)
    print(
        f"{args.model}: {cost.row_bytes} B a token, {cost.state_bytes} B a state; "
        f"{len(requests)} prompts\n\n{_HEADER}"
    )
    for gb in args.gb:
        num_bytes = int(gb * 1e9)
        got, ideal = replayed(
            requests,
            cost,
            num_bytes=num_bytes,
            state_share=args.state_share,
            retention=retention,
            alpha=args.alpha,
        )
        print(_row(gb, got, ideal), flush=True)
    print(f"\n{_LEGEND}")
    return 0


class BesideIdeal(NamedTuple):
    got: Replayed
    ideal: Sequence[IdealHits]


def replayed(
    requests: Sequence[TracedRequest],
    cost: CostModel,
    *,
    num_bytes: int,
    state_share: float,
    retention: Retention,
    alpha: float = ALPHA,
) -> BesideIdeal:
    """Through the cache, and through ideal ones of the same bytes."""
    got = replay(
        _token_ids(requests),
        cost,
        num_bytes=num_bytes,
        state_share=state_share,
        retention=retention,
        alpha=alpha,
    )
    return BesideIdeal(got, ideal_hits(map(_blocks, requests), num_bytes // cost.row_bytes))


_HEADER = """\
| GB | tokens | states | hit rate | LRU | of LRU | Belady | endless |
| --: | --: | --: | --: | --: | --: | --: | --: |"""
_LEGEND = """\
LRU, Belady, endless: caches of the same bytes that spend them all on tokens and have a state after
each of them for nothing. LRU evicts by time of use, Belady by next use, endless not at all."""


def _row(gb: float, got: Replayed, ideal: Sequence[IdealHits]) -> str:
    rates = {hits.policy: hits.rate for hits in ideal}
    lru = rates["lru"]
    of_lru = f"{got.rate / lru:.1%}" if lru else "-"
    tokens = f"{got.num_pages * PAGE:,}"
    return (
        f"| {gb:g} | {tokens} | {got.num_slots:,} | {got.rate:.2%} | {lru:.2%} | {of_lru} "
        f"| {rates['belady']:.2%} | {rates['infinite']:.2%} |"
    )


def _config(name: str) -> ModelConfig:
    return load_config(name) if Path(name).is_dir() else preset(name)


def _token_ids(requests: Iterable[TracedRequest]) -> Iterator[np.ndarray]:
    """Equal blocks have equal ids; no two others share any."""
    numbers: dict[int, int] = {}
    offset_B = np.arange(BLOCK_TOKENS, dtype=np.int32)
    for request in requests:
        block_N = [numbers.setdefault(block, len(numbers)) for block in request.block_ids]
        ids = np.array(block_N, np.int32)[:, None] * BLOCK_TOKENS + offset_B
        yield ids.reshape(-1)[: request.prompt_tokens]


def _blocks(request: TracedRequest) -> list[Block]:
    last = request.prompt_tokens - (len(request.block_ids) - 1) * BLOCK_TOKENS
    sizes = [BLOCK_TOKENS] * (len(request.block_ids) - 1) + [last]
    return [Block(str(key), n) for key, n in zip(request.block_ids, sizes, strict=True)]
