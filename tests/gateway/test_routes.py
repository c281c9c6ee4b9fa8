"""Routes beside the two that call a model."""

from __future__ import annotations

import http.client
import json
import re

import pytest
from openai import NotFoundError
from prometheus_client.parser import text_string_to_metric_families


def send(served, method: str, path: str):
    """(status, headers, body as text)"""
    connection = http.client.HTTPConnection(*served.address, timeout=30)
    try:
        connection.request(method, path)
        response = connection.getresponse()
        return response.status, response.headers, response.read().decode()
    finally:
        connection.close()


def samples(served) -> dict[tuple, float]:
    """(name, labels but le) to value, of /metrics."""
    _, _, text = send(served, "GET", "/metrics")
    return {
        (sample.name, *sorted(sample.labels.items())): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }


def test_the_models(client):
    models = {model.id: model for model in client.models.list()}
    assert set(models) == {"fake", "scripted"}
    assert models["fake"].object == "model"
    assert models["fake"].max_model_len == 4096
    assert client.models.retrieve("fake") == models["fake"]


def test_an_unknown_model(client):
    with pytest.raises(NotFoundError) as caught:
        client.models.retrieve("org/some model")
    assert caught.value.code == "model_not_found"
    assert "'org/some model'" in caught.value.message


def test_health(served):
    status, _, text = send(served, "GET", "/health")
    assert (status, json.loads(text)) == (200, {"status": "ok"})


@pytest.mark.parametrize("path", ["/health", "/metrics", "/v1/models", "/v1/models/fake"])
def test_head_is_get_without_the_body(served, path):
    status, headers, text = send(served, "HEAD", path)
    assert (status, text) == (200, "")
    assert headers["content-type"] == send(served, "GET", path)[1]["content-type"]


@pytest.mark.parametrize("path", ["/", "/v1", "/v1/embeddings", "/v1/chat/completions/", "/x/../y"])
def test_an_unknown_path(served, path):
    status, _, text = send(served, "GET", path)
    error = json.loads(text)["error"]
    assert status == 404
    assert error["type"] == "not_found_error"
    assert path in error["message"]


@pytest.mark.parametrize(
    ("method", "path", "allowed"),
    [
        ("GET", "/v1/chat/completions", "POST"),
        ("PUT", "/v1/completions", "POST"),
        ("HEAD", "/v1/completions", "POST"),
        ("POST", "/v1/models", "GET, HEAD"),
        ("DELETE", "/v1/models/fake", "GET, HEAD"),
        ("POST", "/health", "GET, HEAD"),
    ],
)
def test_a_wrong_method(served, method, path, allowed):
    status, headers, text = send(served, method, path)
    assert status == 405
    assert headers["allow"] == allowed
    if method != "HEAD":
        assert json.loads(text)["error"]["code"] == "method_not_allowed"


def test_metrics_of_a_call(served, client, engine, written_ids):
    engine.script = lambda request: written_ids("four")
    call = (("gen_ai_operation_name", "chat"), ("gen_ai_request_model", "fake"))
    before = samples(served)
    answer = client.chat.completions.create(
        model="fake", messages=[{"role": "user", "content": "hi"}]
    )
    after = samples(served)

    def grown(name: str, *labels) -> float:
        key = (name, *sorted(labels))
        return after[key] - before.get(key, 0.0)

    assert grown("gen_ai_server_request_duration_seconds_count", *call, ("error_type", "")) == 1
    assert grown("gen_ai_server_time_to_first_token_seconds_count", *call) == 1
    assert grown("gen_ai_server_time_per_output_token_seconds_count", *call) == 1
    tokens = "gen_ai_client_token_usage_sum"
    assert grown(tokens, *call, ("gen_ai_token_type", "input")) == answer.usage.prompt_tokens
    assert grown(tokens, *call, ("gen_ai_token_type", "output")) == answer.usage.completion_tokens
    made = grown("perilune_engine_generated_tokens_total", ("model", "fake"))
    assert made == answer.usage.completion_tokens
    route = (("route", "/v1/chat/completions"), ("status", "200"))
    assert grown("perilune_http_requests_total", *route) == 1


def test_metrics_of_failures(served, client, engine):
    engine.fail_after = 0
    before = samples(served)
    send(served, "GET", f"/{'x' * 50}")
    connection = http.client.HTTPConnection(*served.address, timeout=30)
    connection.request("POST", "/v1/completions", '{"model": "fake", "prompt": "a"}')
    assert connection.getresponse().status == 500
    connection.close()
    after = samples(served)
    failed = (
        "gen_ai_server_request_duration_seconds_count",
        ("error_type", "EngineError"),
        ("gen_ai_operation_name", "text_completion"),
        ("gen_ai_request_model", "fake"),
    )
    assert after[failed] - before.get(failed, 0.0) == 1
    other = ("perilune_http_requests_total", ("route", "other"), ("status", "404"))
    assert after[other] - before.get(other, 0.0) == 1


def test_running_sequences_and_open_requests_are_seen(served, client, engine):
    served.pause()
    with client.completions.create(model="fake", prompt="a", stream=True, timeout=30):
        assert engine.wait_for_open(1)
        seen = samples(served)
        assert seen[("perilune_engine_num_running", ("model", "fake"))] == 1
        assert seen[("perilune_http_requests_open",)] == 2  # this scrape is one of them


def test_no_request_leaves_an_open_count_behind(served):
    assert samples(served)[("perilune_http_requests_open",)] == 1


def test_every_answer_has_an_id_of_its_own(served):
    ids = [send(served, "GET", "/health")[1]["x-request-id"] for _ in range(3)]
    assert len(set(ids)) == 3
    assert all(re.fullmatch("[0-9a-f]{24}", request_id) for request_id in ids)
