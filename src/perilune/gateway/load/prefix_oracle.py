"""How many prompt tokens a prefix cache could serve, by policy: bounds for a measured hit rate.

Prompts come one after another, each is in the cache as soon as it came, and only prompts are: not
the answers, which no trace repeats. A hit leaves at least one token of a prompt to compute.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from msgspec import Struct

from perilune.gateway.load.workload import Block

Prompt = Sequence[Block]


class IdealHits(Struct, frozen=True, kw_only=True):
    """Hits of one policy, in tokens."""

    policy: str
    """`infinite`: nothing is ever evicted. `lru`: least recently used goes first. `belady`: what
    is needed last goes first, known from the future; no policy has more hits."""
    capacity_tokens: int | None
    """None is without end."""
    hit_tokens: int
    prompt_tokens: int

    @property
    def rate(self) -> float:
        return self.hit_tokens / self.prompt_tokens if self.prompt_tokens else 0.0


class _Stop(NamedTuple):
    """A piece of a block on the way of a prompt: a node of the tree of all prefixes, which a prompt
    has as a whole or not at all."""

    node: int
    depth: int
    num_tokens: int


def ideal_hits(prompts: Iterable[Prompt], capacity_tokens: int | None) -> list[IdealHits]:
    """Of an endless cache and, given a capacity, of LRU and Belady's rule within it."""
    paths = _paths(prompts)
    num_tokens = sum(stop.num_tokens for path in paths for stop in path)
    no_uses = [[0.0] * len(path) for path in paths]
    runs: list[tuple[str, int | None, list[list[float]]]] = [("infinite", None, no_uses)]
    if capacity_tokens is not None:
        runs += [
            ("lru", capacity_tokens, _recency(paths)),
            ("belady", capacity_tokens, _next_uses(paths)),
        ]
    return [
        IdealHits(
            policy=policy,
            capacity_tokens=capacity,
            hit_tokens=_hits(paths, uses, math.inf if capacity is None else capacity),
            prompt_tokens=num_tokens,
        )
        for policy, capacity, uses in runs
    ]


def _paths(prompts: Iterable[Prompt]) -> list[list[_Stop]]:
    """Blocks are cut wherever a prompt ends in one: its other tokens are not used then."""
    blocks: dict[tuple[int, int, str], int] = {}
    ends: dict[int, set[int]] = {}
    walks: list[list[tuple[int, int]]] = []
    for prompt in prompts:
        walk: list[tuple[int, int]] = []
        before, at = -1, 0
        for block in prompt:
            found = blocks.setdefault((before, at, block.key), len(blocks))
            before, at = found, block.num_tokens
            ends.setdefault(found, set()).add(block.num_tokens)
            walk.append((before, at))
        walks.append(walk)
    cuts = {block: sorted(lengths) for block, lengths in ends.items()}
    nodes: dict[tuple[int, int], int] = {}
    paths: list[list[_Stop]] = []
    for walk in walks:
        path: list[_Stop] = []
        for block, num_tokens in walk:
            begin = 0
            for end in cuts[block][: cuts[block].index(num_tokens) + 1]:
                node = nodes.setdefault((block, end), len(nodes))
                path.append(_Stop(node, len(path), end - begin))
                begin = end
        paths.append(path)
    return paths


def _recency(paths: Sequence[Sequence[_Stop]]) -> list[list[float]]:
    """Smaller is evicted later, as in `_next_uses`: the newest prompt has the smallest number."""
    return [[-float(number)] * len(path) for number, path in enumerate(paths)]


def _next_uses(paths: Sequence[Sequence[_Stop]]) -> list[list[float]]:
    """The number of the next prompt with the same node, for each stop of each prompt."""
    coming: dict[int, float] = {}
    uses: list[list[float]] = []
    for number in reversed(range(len(paths))):
        uses.append([coming.get(stop.node, math.inf) for stop in paths[number]])
        coming.update((stop.node, float(number)) for stop in paths[number])
    return uses[::-1]


def _hits(
    paths: Sequence[Sequence[_Stop]], uses: Sequence[Sequence[float]], capacity: float
) -> int:
    """Evicts the greatest use first and, among equals, the deepest: never a parent before its
    child, so that what is held is always a tree of prefixes. The last piece evicted is cut."""
    held: dict[int, int] = {}
    use_of: dict[int, float] = {}
    victims: list[tuple[float, int, int]] = []
    used = hits = 0
    for path, path_uses in zip(paths, uses, strict=True):
        hits += min(_matched(path, held), sum(stop.num_tokens for stop in path) - 1)
        for stop, use in zip(path, path_uses, strict=True):
            before = held.get(stop.node, 0)
            held[stop.node] = max(before, stop.num_tokens)
            used += held[stop.node] - before
            use_of[stop.node] = use
            if capacity < math.inf:
                heapq.heappush(victims, (-use, -stop.depth, stop.node))
        while used > capacity:
            use, _, node = victims[0]
            if use_of.get(node) != -use:
                heapq.heappop(victims)  # it has been used since
                continue
            cut = min(used - int(capacity), held[node])
            held[node] -= cut
            used -= cut
            if not held[node]:
                heapq.heappop(victims)
                del held[node], use_of[node]
    return hits


def _matched(path: Sequence[_Stop], held: dict[int, int]) -> int:
    matched = 0
    for stop in path:
        here = min(held.get(stop.node, 0), stop.num_tokens)
        matched += here
        if here < stop.num_tokens:
            break
    return matched
