"""Prometheus metrics of a server.

The names are those of the OpenTelemetry conventions for generative AI
(`gen_ai.server.time_to_first_token` becomes `gen_ai_server_time_to_first_token_seconds`); what they
lack stands under `perilune_`.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.metrics_core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from perilune.core.types import EngineStats, Usage

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"

SECONDS = (0.01, 0.02, 0.04, 0.08, 0.16, 0.32, 0.64, 1.28, 2.56, 5.12, 10.24, 20.48, 40.96, 81.92)
SECONDS_PER_TOKEN = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.4, 1.0)
TOKENS = tuple(float(4**power) for power in range(12))
"""Bucket bounds that the conventions advise, shortened at the ends."""

_CALL = ("gen_ai_operation_name", "gen_ai_request_model")


class ServerMetrics:
    """All metrics of one server, in a registry of their own."""

    def __init__(self) -> None:
        self.registry = registry = CollectorRegistry()
        self.request_duration = Histogram(
            "gen_ai_server_request_duration_seconds",
            "Time from the request to the end of the answer",
            (*_CALL, "error_type"),
            buckets=SECONDS,
            registry=registry,
        )
        self.time_to_first_token = Histogram(
            "gen_ai_server_time_to_first_token_seconds",
            "Time from the request to the first piece of the answer",
            _CALL,
            buckets=SECONDS,
            registry=registry,
        )
        self.time_per_output_token = Histogram(
            "gen_ai_server_time_per_output_token_seconds",
            "Mean time between the tokens of an answer after its first one",
            _CALL,
            buckets=SECONDS_PER_TOKEN,
            registry=registry,
        )
        self.token_usage = Histogram(
            "gen_ai_client_token_usage",
            "Tokens of a request, by gen_ai_token_type",
            (*_CALL, "gen_ai_token_type"),
            buckets=TOKENS,
            registry=registry,
        )
        self.http_requests = Counter(
            "perilune_http_requests",
            "Requests answered, by route and status",
            ("route", "status"),
            registry=registry,
        )
        self.http_requests_open = Gauge(
            "perilune_http_requests_open", "Requests being answered now", registry=registry
        )
        self._engines = _EngineCollector()
        registry.register(self._engines)

    def watch_engine(self, model_id: str, stats: Callable[[], EngineStats]) -> None:
        """Reads `stats` at every scrape and shows it under the label `model`."""
        self._engines.stats[model_id] = stats

    def exposition(self) -> bytes:
        """The text that /metrics answers with."""
        return generate_latest(self.registry)


class CallTimer:
    """The clock of one call to a model; `finish` records it."""

    def __init__(self, metrics: ServerMetrics, operation: str, model_id: str) -> None:
        self._metrics = metrics
        self._labels = (operation, model_id)
        self._started_s = time.perf_counter()
        self._first_s: float | None = None

    def saw_output(self) -> None:
        """To be called at every piece of output; the first one counts."""
        if self._first_s is None:
            self._first_s = time.perf_counter()
            self._metrics.time_to_first_token.labels(*self._labels).observe(
                self._first_s - self._started_s
            )

    def choice_done(self, usage: Usage) -> None:
        """Records one finished choice."""
        tokens = self._metrics.token_usage
        tokens.labels(*self._labels, "input").observe(usage.prompt_tokens)
        tokens.labels(*self._labels, "output").observe(usage.completion_tokens)
        if self._first_s is not None and usage.completion_tokens > 1:
            self._metrics.time_per_output_token.labels(*self._labels).observe(
                (time.perf_counter() - self._first_s) / (usage.completion_tokens - 1)
            )

    def finish(self, error_type: str = "") -> None:
        """Records the duration; `error_type` is empty for a call that went well."""
        self._metrics.request_duration.labels(*self._labels, error_type).observe(
            time.perf_counter() - self._started_s
        )


class _EngineCollector(Collector):
    """One family a quantity, one sample a model."""

    def __init__(self) -> None:
        self.stats: dict[str, Callable[[], EngineStats]] = {}

    def describe(self) -> Iterable[Metric]:
        return ()

    def collect(self) -> Iterator[Metric]:
        snapshots = {model_id: stats() for model_id, stats in self.stats.items()}
        for family, text, name in (
            (GaugeMetricFamily, "Sequences in the running batch", "num_running"),
            (GaugeMetricFamily, "Sequences waiting for admission", "num_waiting"),
            (GaugeMetricFamily, "Bytes of cache memory in use", "cache_bytes"),
            (CounterMetricFamily, "Prompt tokens read", "prompt_tokens_total"),
            (
                CounterMetricFamily,
                "Of these, from the cache",
                "prefix_cache_hit_tokens_total",
            ),
            (CounterMetricFamily, "Sequences that lost their memory", "preemptions_total"),
            (CounterMetricFamily, "Tokens made", "generated_tokens_total"),
            (CounterMetricFamily, "Tokens guessed and verified", "drafted_tokens_total"),
            (CounterMetricFamily, "Guessed tokens that were right", "accepted_tokens_total"),
            (CounterMetricFamily, "Starts after a crash", "restarts_total"),
        ):
            metric = family(f"perilune_engine_{name}", text, labels=("model",))
            for model_id, snapshot in snapshots.items():
                metric.add_metric((model_id,), getattr(snapshot, name))
            yield metric
