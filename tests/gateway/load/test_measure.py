"""Whole load tests against the real front, and against servers that misbehave."""

from __future__ import annotations

import asyncio
import json
import re

import msgspec
import pytest
from raw_server import GOOD, RawServer, piece, reply, running, stream, usage

from perilune.gateway.load.errors import TargetError, TraceError, WorkloadError
from perilune.gateway.load.level import Limits
from perilune.gateway.load.measure import LoadResult, measure
from perilune.gateway.load.plan import LoadTest
from perilune.gateway.load.report import markdown
from perilune.gateway.load.workload import Bounds, Load

FAST = Load(arrivals="constant", rate=200.0)
PATIENT = Limits(max_lag_s=60.0)
"""A busy machine may be late; that is tested where time is virtual."""


@pytest.fixture
def trace(tmp_path):
    """Three conversations of Mooncake's kind: block 0 is shared by all, 1 by two."""
    path = tmp_path / "trace.jsonl"
    ids = [[0, 1, 2], [0, 1, 3], [0, 4, 5], [0, 1, 2]]
    lines = [
        {"timestamp": 10 * k, "input_length": 1400, "output_length": 100, "hash_ids": hashes}
        for k, hashes in enumerate(ids)
    ]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


def test_of(url: str, **fields) -> LoadTest:
    """Of requests of 20 tokens, without warm-up, that the fake engine understands."""
    usual = {
        "first_id": 97,
        "end_id": 123,
        "prompt_tokens": 20,
        "output_tokens": 5,
        "loads": (FAST,),
        "bounds": Bounds(num_requests=10),
        "limits": PATIENT,
        "num_warmup": 0,
    }
    return LoadTest(url=url, **(usual | fields))


test_of.__test__ = False


def run(url: str, **fields) -> LoadResult:
    return asyncio.run(measure(test_of(url, **fields)))


def against(server: RawServer, **fields) -> LoadResult:
    async def main() -> LoadResult:
        async with running(server) as url:
            return await measure(test_of(url, **fields))

    return asyncio.run(main())


def test_a_trace_goes_out_as_it_is_and_what_it_shares_is_shared(served, engine, trace):
    result = run(
        served.address.url,
        trace=trace,
        scale_tokens=0.1,
        loads=(Load(arrivals="trace", speed=0.5), Load(arrivals="trace", rate=100.0)),
        num_warmup=2,
        bounds=Bounds(),
    )
    ids = [request.prompt_ids for request in engine.requests]
    assert len(ids) == 2 + 4 + 4
    assert all(len(prompt) == 51 + 51 + 38 for prompt in ids)
    assert all(request.max_tokens == 10 for request in engine.requests)
    by_turn = [sorted(turn) for turn in (ids[:2], ids[2:6], ids[6:])]
    for _, first, second in [(turn, *turn[:2]) for turn in by_turn[1:]]:
        assert first[:51] == second[:51]
    assert len({prompt[:51] for prompt in ids}) == 3  # warm-up and each load have their own
    assert len(set(by_turn[1])) == 3
    level = result.levels[0]
    assert (level.num_ok, level.num_requests) == (4, 4)
    assert level.output_tokens.mean == level.asked_output_tokens.mean == 10
    (ideal,) = level.ideal_hits
    assert ideal.hit_tokens == 102 + 51 + 139
    assert level.measured_hits[0].rate == 0.0
    assert level.offered_rate == pytest.approx(3 / 0.06)
    assert result.levels[1].offered_rate == pytest.approx(100.0)


def test_arrivals_do_not_wait_for_a_server_that_stands_still(served, engine):
    """All are in the engine at once, though none has been answered; the standstill is in TTFT."""

    async def main() -> tuple[LoadResult, float]:
        loop = asyncio.get_running_loop()
        served.pause()
        started = asyncio.create_task(measure(test_of(served.address.url, loads=(FAST,))))
        assert await asyncio.to_thread(engine.wait_for_open, 10)
        all_sent_at = loop.time()
        await asyncio.sleep(0.3)
        stood_s = loop.time() - all_sent_at
        served.resume()
        return await started, stood_s

    result, stood_s = asyncio.run(main())
    (level,) = result.levels
    assert level.num_ok == level.max_in_flight == 10
    assert level.ttft_s.p50 >= stood_s >= 0.3


def test_a_closed_loop_against_the_same_server_waits(served, engine):
    async def main() -> LoadResult:
        served.pause()
        loads = (Load(arrivals="closed", concurrency=2),)
        started = asyncio.create_task(measure(test_of(served.address.url, loads=loads)))
        assert await asyncio.to_thread(engine.wait_for_open, 2)
        served.resume()
        return await started

    (level,) = asyncio.run(main()).levels
    assert level.max_in_flight == 2
    assert level.num_ok == 10


def test_the_result_and_its_profile_are_json_that_can_be_read_back(served):
    result = run(served.address.url, loads=(FAST, Load(arrivals="closed", concurrency=1)))
    assert msgspec.json.decode(msgspec.json.encode(result), type=LoadResult) == result
    assert result.model == "fake"
    assert result.config["loads"][1]["concurrency"] == 1
    assert [point.load for point in result.profile.points] == [
        "constant at 200/s",
        "1 at a time",
    ]
    assert result.profile.points[0].min_prompt_tokens == 20
    assert result.profile.software["server"].startswith("perilune-")
    assert "cores" in result.hardware
    text = markdown(result)
    assert "time to first token" in text
    assert text.count("\n## ") == 2
    assert "energy" in text


def test_text_prompts_through_chat(served, engine):
    result = run(served.address.url, endpoint="chat", prompt_form="text", ignore_eos=False)
    assert result.levels[0].num_ok == 10
    assert len({request.prompt_ids for request in engine.requests}) == 10


def test_what_the_context_does_not_hold_is_left_out(served, trace):
    result = run(served.address.url, trace=trace, loads=(FAST,), scale_tokens=0.1, max_context=150)
    assert result.levels[0].num_left_out == 0
    with pytest.raises(WorkloadError, match=r"no request is left of trace\.jsonl.*of 149 tokens"):
        run(served.address.url, trace=trace, scale_tokens=0.1, max_context=149)
    with pytest.raises(WorkloadError, match="20 prompt tokens, 5 output tokens"):
        run(served.address.url, max_context=24)


def test_nothing_within_the_bounds(served, trace):
    with pytest.raises(WorkloadError, match="came within the bounds"):
        run(
            served.address.url,
            loads=(Load(arrivals="poisson", rate=0.001),),
            bounds=Bounds(seconds=0.001),
        )
    with pytest.raises(WorkloadError, match="no request is left"):
        run(served.address.url, trace=trace, scale_tokens=0.1, skip=4)


def test_a_trace_that_is_wrong_costs_no_request(served, engine, trace):
    trace.write_text(trace.read_text() + "{\n")
    with pytest.raises(TraceError, match="line 5"):
        run(served.address.url, trace=trace, scale_tokens=0.1)
    assert engine.requests == []


def test_a_warm_up_that_fails_says_why(served):
    with pytest.raises(TargetError, match=r"http 400.*outside the vocabulary of 512"):
        run(served.address.url, first_id=300, end_id=4000, num_warmup=1)


def test_without_warm_up_the_failures_stand_in_the_result(served):
    result = run(served.address.url, first_id=600, end_id=4000)
    (level,) = result.levels
    assert level.failures == {"http 400": 10}
    assert not level.trusted
    assert result.profile is None
    assert "outside the vocabulary" in markdown(result)


BUSY = reply('{"error": {"message": "full"}}', "429 Too Many Requests", "retry-after: 7")


def test_a_server_that_refuses_and_drops(served):
    answers = [GOOD, BUSY, stream(piece("a")), reply("no", "500 Oh"), GOOD]
    result = against(
        RawServer(lambda number: answers[number % 5]),
        loads=(Load(arrivals="closed", concurrency=1),),
    )
    (level,) = result.levels
    assert level.failures == {"cut off": 2, "http 429": 2, "http 500": 2}
    assert (level.num_ok, level.num_429, level.longest_retry_after_s) == (4, 2, 7.0)
    assert result.profile.points[0].failed == pytest.approx(0.6)
    assert "refused 2 times with 429, Retry-After up to 7 s" in markdown(result)


def test_prefix_hits_by_usage_and_by_metric():
    scrapes = iter([(100, 1000), (350, 2000)])
    server = RawServer(
        lambda number: stream(piece("a"), piece("", "length"), usage(20, 5, 4), "[DONE]")
    )

    def metrics() -> bytes:
        hits, prompts = next(scrapes)
        return reply(
            "# TYPE perilune_prefix_cache_hit_tokens counter\n"
            f"perilune_prefix_cache_hit_tokens_total {hits}\n"
            "# TYPE perilune_prompt_tokens counter\n"
            f"perilune_prompt_tokens_total {prompts}\n"
        )

    server.metrics = metrics
    result = against(server, cache_tokens=1000)
    (level,) = result.levels
    assert [hits.rate for hits in level.measured_hits] == [0.2, 0.25]
    assert [hits.policy for hits in level.ideal_hits] == ["infinite", "lru", "belady"]
    assert any("the cache was warm" in mark for mark in level.marks)
    assert result.profile.points[0].cached == pytest.approx(0.2)
    said = re.search(r"prefix hits: .*", markdown(result))[0]
    assert "20.0% by usage, 25.0% by perilune_prefix_cache_hit_tokens_total" in said


def test_goodput_is_told_with_its_objectives(served):
    limits = Limits(slo_ttft_s=60.0, slo_tpot_s=30.0, max_lag_s=60.0)
    text = markdown(run(served.address.url, limits=limits))
    assert "100.0% within TTFT 60000 ms, TPOT 30000 ms" in text


def test_hardware_elsewhere_is_not_guessed(monkeypatch, served):
    result = run(served.address.url, hardware="8 H200")
    assert result.hardware == result.profile.hardware == "8 H200"
