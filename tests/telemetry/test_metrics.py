"""Names and numbers of /metrics."""

from __future__ import annotations

import pytest
from prometheus_client.parser import text_string_to_metric_families

from perilune.core.types import EngineStats, Usage
from perilune.telemetry import metrics
from perilune.telemetry.metrics import CallTimer, ServerMetrics

CALL = {"gen_ai_operation_name": "chat", "gen_ai_request_model": "m"}


class Clock:
    now_s = 100.0

    def perf_counter(self) -> float:
        return self.now_s


@pytest.fixture
def clock(monkeypatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(metrics, "time", clock)
    return clock


def value(server: ServerMetrics, name: str, **labels: str) -> float | None:
    return server.registry.get_sample_value(name, labels)


def test_the_clock_of_a_call(clock):
    server = ServerMetrics()
    timer = CallTimer(server, "chat", "m")
    clock.now_s += 0.25
    timer.saw_output()
    clock.now_s += 2.0
    timer.saw_output()
    timer.choice_done(Usage(prompt_tokens=7, completion_tokens=5))
    clock.now_s += 1.0
    timer.finish()
    assert value(server, "gen_ai_server_time_to_first_token_seconds_sum", **CALL) == 0.25
    assert value(server, "gen_ai_server_time_per_output_token_seconds_sum", **CALL) == 0.5
    duration = "gen_ai_server_request_duration_seconds_sum"
    assert value(server, duration, **CALL, error_type="") == 3.25
    tokens = "gen_ai_client_token_usage_sum"
    assert value(server, tokens, **CALL, gen_ai_token_type="input") == 7
    assert value(server, tokens, **CALL, gen_ai_token_type="output") == 5


def test_one_token_has_no_time_between_tokens(clock):
    server = ServerMetrics()
    timer = CallTimer(server, "chat", "m")
    timer.saw_output()
    timer.choice_done(Usage(prompt_tokens=1, completion_tokens=1))
    assert value(server, "gen_ai_server_time_per_output_token_seconds_count", **CALL) is None


def test_a_call_without_output_has_no_first_token(clock):
    server = ServerMetrics()
    CallTimer(server, "chat", "m").finish("EngineError")
    assert value(server, "gen_ai_server_time_to_first_token_seconds_count", **CALL) is None
    duration = "gen_ai_server_request_duration_seconds_count"
    assert value(server, duration, **CALL, error_type="EngineError") == 1


def test_engines_are_read_at_every_scrape():
    server = ServerMetrics()
    counts = iter(range(1, 100))
    server.watch_engine("a", lambda: EngineStats(num_running=next(counts), cache_bytes=10))
    server.watch_engine("b", lambda: EngineStats(num_waiting=5, prompt_tokens_total=9))
    assert value(server, "perilune_engine_num_running", model="a") == 1
    assert value(server, "perilune_engine_num_running", model="a") == 2
    assert value(server, "perilune_engine_num_waiting", model="b") == 5
    assert value(server, "perilune_engine_prompt_tokens_total", model="b") == 9
    assert value(server, "perilune_engine_cache_bytes", model="a") == 10


def test_the_exposition_parses_and_names_each_family_once():
    server = ServerMetrics()
    for model_id in ("a", "b"):
        server.watch_engine(model_id, EngineStats)
    families = list(text_string_to_metric_families(server.exposition().decode()))
    names = [family.name for family in families]
    assert len(names) == len(set(names))
    assert "gen_ai_server_time_to_first_token_seconds" in names
    assert "perilune_engine_generated_tokens" in names


def test_two_servers_do_not_share_numbers():
    one, other = ServerMetrics(), ServerMetrics()
    one.http_requests.labels("/health", "200").inc()
    assert value(other, "perilune_http_requests_total", route="/health", status="200") is None
