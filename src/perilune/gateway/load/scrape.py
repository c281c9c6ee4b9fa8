"""Counters of a server's /metrics, before and after."""

from __future__ import annotations

from collections.abc import Mapping

from msgspec import Struct
from prometheus_client.parser import text_string_to_metric_families

HIT_AND_PROMPT_TOKENS = (
    ("perilune_prefix_cache_hit_tokens_total", "perilune_prompt_tokens_total"),
    ("perilune_engine_prefix_cache_hit_tokens_total", "perilune_engine_prompt_tokens_total"),
    ("vllm:prefix_cache_hits_total", "vllm:prefix_cache_queries_total"),
)
"""Names of the prompt tokens that a prefix cache served, and of all prompt tokens."""


class MeasuredHits(Struct, frozen=True, kw_only=True):
    source: str
    """Where it was read: `usage` of the answers, or a metric."""
    hit_tokens: int
    prompt_tokens: int

    @property
    def rate(self) -> float:
        return self.hit_tokens / self.prompt_tokens if self.prompt_tokens else 0.0


def samples_of(text: str | None) -> dict[str, float]:
    """Every sample's value, summed over its labels; nothing for a text that is no exposition.

    Whether it is a counter is not asked: the two text formats disagree on the name in its TYPE.
    """
    totals: dict[str, float] = {}
    try:
        for family in text_string_to_metric_families(text or ""):
            for sample in family.samples:
                totals[sample.name] = totals.get(sample.name, 0.0) + sample.value
    except (ValueError, KeyError, IndexError):  # how that parser says that a line is wrong
        return {}
    return totals


def hits_between(before: Mapping[str, float], after: Mapping[str, float]) -> MeasuredHits | None:
    """By the first pair of counters that the server has; None without one."""
    for hits, prompts in HIT_AND_PROMPT_TOKENS:
        if hits in after and prompts in after:
            return MeasuredHits(
                source=hits,
                hit_tokens=round(after[hits] - before.get(hits, 0.0)),
                prompt_tokens=round(after[prompts] - before.get(prompts, 0.0)),
            )
    return None
