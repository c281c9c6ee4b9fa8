"""Prompts of a trace through the prefix cache, without a model: how much it would have to compute.

One prompt after another, each cached when the next one comes. Answers are left out: a trace does
not tell their tokens.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

import numpy as np

from perilune.core.errors import ConfigError
from perilune.engine.cost_model import CostModel
from perilune.engine.pages import PagePool
from perilune.engine.prefix_cache import PrefixCache
from perilune.engine.prefix_use import PrefixUse
from perilune.engine.retention import Retention, cuts
from perilune.engine.slots import SlotPool
from perilune.model.pools import PAGE


class Replayed(NamedTuple):
    num_pages: int
    num_slots: int
    prompt_tokens: int
    hit_tokens: int
    written_tokens: int
    num_too_long: int
    """Prompts that the whole pool cannot hold; none of their tokens is a hit."""

    @property
    def rate(self) -> float:
        return self.hit_tokens / self.prompt_tokens if self.prompt_tokens else 0.0


def replay(
    prompts: Iterable[np.ndarray],
    cost: CostModel,
    *,
    num_bytes: int,
    state_share: float,
    retention: Retention,
    alpha: float,
    page_len: int = PAGE,
) -> Replayed:
    """`num_bytes` hold both pools; `state_share` of them go to states.

    Raises:
        ConfigError: it leaves no page, or too few slots for the states of one prompt.
    """
    num_slots = int(num_bytes * state_share / cost.state_bytes)
    num_pages = int(num_bytes * (1 - state_share) / (cost.row_bytes * page_len))
    if num_slots < retention.max_cuts + 2 or num_pages < 1:
        raise ConfigError(
            f"{num_bytes} bytes, {state_share:g} of them for states, are {num_pages} pages and "
            f"{num_slots} slots; a prompt needs pages and up to {retention.max_cuts + 2} slots"
        )
    pages, slots = PagePool(num_pages + 1), SlotPool(num_slots)
    cache = PrefixCache(pages, slots, page_len=page_len, cost=cost, alpha=alpha)
    num_tokens, num_too_long, uses = 0, 0, []
    for tokens in prompts:
        num_tokens += len(tokens)
        if -(-len(tokens) // page_len) > num_pages:
            num_too_long += 1
            continue
        uses.append(_serve(tokens, cache, pages, slots, retention, page_len))
    cache.check()
    read, written = (sum(use[i] for use in uses) for i in (0, 1))
    return Replayed(num_pages, num_slots, num_tokens, read, written, num_too_long)


def _serve(
    tokens: np.ndarray,
    cache: PrefixCache,
    pages: PagePool,
    slots: SlotPool,
    retention: Retention,
    page_len: int,
) -> PrefixUse:
    """As the scheduler does, with nobody else running."""
    hit = cache.lookup(tokens)
    at = cuts(len(tokens), hit.num_tokens, hit.branch_points, retention)
    num_fresh = -(-len(tokens) // page_len) - len(hit.pages)
    if not cache.make_room(num_fresh, len(at) + 1):
        # What the hit holds is part of what is missing: without it there is room.
        cache.drop(hit)
        hit = cache.lookup(tokens[:1])
        num_fresh = -(-len(tokens) // page_len)
        cache.make_room(num_fresh, len(at) + 1)
    table, own = [*hit.pages, *pages.allocate(num_fresh)], slots.allocate(1)
    cache.settle(hit)
    written = 0
    for cut in at:
        [slot] = slots.allocate(1)
        published = cache.publish(tokens, cut.num_tokens, table, slot, cut.reason)
        written += published.num_new_tokens
    pages.release(table)
    slots.release(own)
    return PrefixUse(hit.num_tokens, written)
