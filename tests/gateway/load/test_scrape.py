"""Counters of /metrics, before and after."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from perilune.core.types import EngineStats
from perilune.gateway.load.scrape import hits_between, samples_of
from perilune.telemetry.metrics import ServerMetrics

TEXT = """# TYPE perilune_prefix_cache_hit_tokens counter
perilune_prefix_cache_hit_tokens_total{model="a"} 10
perilune_prefix_cache_hit_tokens_total{model="b"} 5
# TYPE perilune_prompt_tokens counter
perilune_prompt_tokens_total{model="a"} 100
# TYPE perilune_http_requests_open gauge
perilune_http_requests_open 3
"""


def test_labels_are_summed():
    assert samples_of(TEXT) == {
        "perilune_prefix_cache_hit_tokens_total": 15.0,
        "perilune_prompt_tokens_total": 100.0,
        "perilune_http_requests_open": 3.0,
    }


def test_the_difference_counts():
    before = samples_of(TEXT)
    after = before | {
        "perilune_prefix_cache_hit_tokens_total": 45.0,
        "perilune_prompt_tokens_total": 200.0,
    }
    hits = hits_between(before, after)
    assert (hits.hit_tokens, hits.prompt_tokens, hits.rate) == (30, 100, 0.3)
    assert hits.source == "perilune_prefix_cache_hit_tokens_total"
    assert hits_between({}, before).rate == 0.15
    assert hits_between(before, before).rate == 0.0


def test_a_server_without_a_prefix_cache_has_none():
    metrics = ServerMetrics()
    metrics.watch_engine("m", lambda: EngineStats(prompt_tokens_total=7))
    found = samples_of(metrics.exposition().decode())
    assert found["perilune_engine_prompt_tokens_total"] == 7.0
    without = {name: value for name, value in found.items() if "cache" not in name}
    assert hits_between({}, without) is None


@pytest.mark.parametrize("text", [None, "", "<html>", 'a{b="', "a b"])
def test_what_is_no_exposition_has_no_samples(text):
    assert samples_of(text) == {}


@given(st.text(max_size=80))
def test_no_text_brings_an_error(text):
    samples_of(f"# TYPE x counter\nx_total{text}\n{text}")
