"""Samples as numbers: what counts, what is marked, and what is refused."""

from __future__ import annotations

import pytest

from perilune.gateway.load.level import Limits, Surroundings
from perilune.gateway.load.point import profile_points
from perilune.gateway.load.prefix_oracle import IdealHits
from perilune.gateway.load.sample import OK, Sample
from perilune.gateway.load.scrape import MeasuredHits
from perilune.gateway.load.summary import summed_up
from perilune.gateway.load.workload import Block, Load, Request

OPEN = Load(arrivals="constant", rate=10.0)


def sample(
    due: float = 0.0,
    *,
    ttft: float = 0.2,
    tpot: float = 0.01,
    prompt: int = 100,
    output: int = 11,
    lag: float = 0.0,
    **fields,
) -> Sample:
    last = due + ttft + tpot * (output - 1)
    answer = {
        "first_at": due + ttft,
        "last_at": last,
        "ended_at": last,
        "status": OK,
        "prompt_tokens": prompt,
        "output_tokens": output,
    }
    request = Request(due, (Block("x", prompt),), output)
    return Sample(request=request, due_at=due, sent_at=due + lag, **(answer | fields))


def failed(due: float = 0.0, status: str = "http 503", **fields) -> Sample:
    nothing = {"first_at": None, "last_at": None, "prompt_tokens": None, "output_tokens": None}
    return sample(due, status=status, **(nothing | {"ended_at": due + 0.1} | fields))


def level_of(samples, limits: Limits | None = None, load: Load = OPEN, **seen):
    around = {
        "loop_delays_s": [0.0],
        "cpu_s": 0.5,
        "energy_j": {},
        "ideal_hits": [],
        "metric_hits": None,
        "num_left_out": 0,
    }
    return summed_up(samples, load, limits or Limits(), Surroundings(**(around | seen)))


def test_rates_count_what_was_answered():
    level = level_of([*(sample(k / 10) for k in range(10)), failed(0.5), failed(0.6, "timeout")])
    assert (level.num_requests, level.num_ok) == (12, 10)
    assert level.failures == {"http 503": 1, "timeout": 1}
    assert level.elapsed_s == pytest.approx(0.9 + 0.3)
    assert level.requests_per_s == pytest.approx(10 / 1.2)
    assert level.output_tokens_per_s == pytest.approx(110 / 1.2)
    assert level.prompt_tokens_per_s == pytest.approx(1000 / 1.2)
    assert level.offered_rate == pytest.approx(11 / 0.9)
    assert level.mean_in_flight == pytest.approx((10 * 0.3 + 2 * 0.1) / 1.2)
    assert level.generator_cpu == pytest.approx(0.5 / 1.2)
    assert level.tpot_s.p50 == pytest.approx(0.01)
    assert level.trusted


def test_requests_in_flight_are_those_between_sending_and_the_end():
    assert level_of([sample(k) for k in range(5)]).max_in_flight == 1
    assert level_of([sample(k / 8) for k in range(5)]).max_in_flight == 3


def test_a_request_given_up_is_not_forgotten():
    slow = failed(1.0, "timeout", ended_at=31.0, is_censored=True)
    level = level_of([sample(0.0), slow])
    assert level.ttft_s.max == level.e2e_s.max == pytest.approx(30.0)
    assert any("1 requests were given up" in mark for mark in level.marks)
    assert level_of([sample(0.0), failed(1.0)]).ttft_s.num == 1


def test_a_timeout_after_the_first_output_keeps_its_first_output():
    slow = failed(1.0, "timeout", first_at=1.5, ended_at=31.0, is_censored=True)
    level = level_of([sample(0.0), slow])
    assert level.ttft_s.max == pytest.approx(0.5)
    assert level.e2e_s.max == pytest.approx(30.0)


@pytest.mark.parametrize(
    ("limits", "share"),
    [
        ({"slo_ttft_s": 0.3}, 0.5),
        ({"slo_ttft_s": 0.1}, 0.0),
        ({"slo_tpot_s": 0.02}, 0.5),
        ({"slo_ttft_s": 0.3, "slo_tpot_s": 0.02}, 0.25),
        ({"slo_ttft_s": 9.0, "slo_tpot_s": 9.0}, 0.75),
    ],
)
def test_goodput_counts_a_failure_as_a_miss(limits, share):
    samples = [sample(), sample(ttft=0.4), sample(tpot=0.05), failed()]
    level = level_of(samples, Limits(**limits))
    assert level.goodput.share == share
    assert level.goodput.requests_per_s == pytest.approx(share * 4 / level.elapsed_s)
    assert level_of(samples).goodput is None


def test_an_answer_of_one_token_has_no_time_per_token_to_miss():
    level = level_of([sample(output=1, tpot=9.0)], Limits(slo_tpot_s=0.01))
    assert level.tpot_s is None
    assert level.goodput.share == 1.0


@pytest.mark.parametrize(
    ("lag", "delay", "max_lag", "trusted"),
    [
        (0.019, 0.0, None, True),
        (0.021, 0.0, None, False),
        (0.0, 0.021, None, False),
        (0.021, 0.0, 0.03, True),
        (0.001, 0.0, 0.0005, False),
    ],
)
def test_a_late_generator_is_refused(lag, delay, max_lag, trusted):
    """Allowed is a tenth of the median time to first token, here 20 ms."""
    level = level_of(
        [sample(lag=lag)] * 5, Limits(max_lag_s=max_lag), loop_delays_s=[0.0, delay, delay]
    )
    assert level.trusted == trusted
    assert any("REFUSED" in mark for mark in level.marks) != trusted


def test_a_fast_server_leaves_ten_milliseconds():
    assert level_of([sample(ttft=0.001, lag=0.009)]).trusted
    assert not level_of([sample(ttft=0.001, lag=0.011)]).trusted


def test_without_an_answer_there_is_nothing_to_trust():
    level = level_of([failed(message="it broke"), failed(1.0, message="again")])
    assert not level.trusted
    assert level.ttft_s is None
    assert level.messages == {"http 503": "it broke"}
    assert "REFUSED: no request was answered" in level.marks


@pytest.mark.parametrize(
    ("samples", "says"),
    [
        ([sample(), failed()], "1 of 2 requests failed"),
        ([sample()] * 99, "p99 is of 99 requests"),
        ([sample(output=5, tpot=0.1), sample(output_tokens=4)], "1 answers were shorter"),
        ([sample(output_tokens=None, num_pieces=11)], "the server gave no usage"),
        (
            [sample(k / 10, ttft=0.2 + k) for k in range(40)],
            "the server fell behind: 19 requests in flight half way, 36 at the last arrival",
        ),
    ],
)
def test_marks(samples, says):
    assert any(says in mark for mark in level_of(samples).marks)
    assert not any(says in mark for mark in level_of([sample(k / 10) for k in range(200)]).marks)


def test_a_warm_cache_is_noticed():
    ideal = IdealHits(policy="infinite", capacity_tokens=None, hit_tokens=50, prompt_tokens=200)

    def marks(cached: int) -> list[str]:
        samples = [sample(cached_tokens=0), sample(cached_tokens=cached)]
        level = level_of(samples, ideal_hits=[ideal])
        assert level.measured_hits[0].rate == cached / 200
        return [mark for mark in level.marks if "warm" in mark]

    assert marks(50) == []
    assert len(marks(60)) == 1


def test_hits_by_usage_and_by_metric_stand_side_by_side():
    metric = MeasuredHits(source="hits_total", hit_tokens=1, prompt_tokens=4)
    level = level_of([sample(cached_tokens=30)], metric_hits=metric)
    assert [(hits.source, hits.rate) for hits in level.measured_hits] == [
        ("usage", 0.3),
        ("hits_total", 0.25),
    ]
    assert level_of([sample()]).measured_hits == []


def test_refusals_are_counted_apart():
    busy = failed(status="http 429", num_429=3, retry_after_s=2.0)
    level = level_of([sample(num_429=1, retry_after_s=1.0), busy])
    assert level.num_429 == 4
    assert level.longest_retry_after_s == 2.0
    assert level.failures == {"http 429": 1}


def test_a_closed_loop_offers_no_rate():
    assert level_of([sample()], load=Load(arrivals="closed", concurrency=1)).offered_rate is None


def test_points_of_a_profile_are_by_prompt_length():
    samples = [
        *(sample(k, prompt=100, ttft=0.1, cached_tokens=10) for k in range(10)),
        *(sample(k, prompt=120, ttft=0.2, cached_tokens=0) for k in range(10)),
        *(sample(k, prompt=1024, ttft=1.0, cached_tokens=512) for k in range(10)),
        failed(5.0, prompt=1025),
    ]
    level = level_of(samples)
    all_points, short, long = profile_points(samples, level)
    assert (all_points.num_requests, short.num_requests, long.num_requests) == (31, 20, 11)
    assert (short.min_prompt_tokens, short.max_prompt_tokens) == (100, 120)
    assert (long.min_prompt_tokens, long.max_prompt_tokens) == (1024, 1025)
    assert (short.ttft_s.p50, short.ttft_s.p90) == pytest.approx((0.1, 0.2))
    assert long.ttft_s.p50 == pytest.approx(1.0)
    assert short.cached == pytest.approx(100 / 2200)
    assert (short.failed, long.failed) == pytest.approx((0.0, 1 / 11))
    assert short.requests_per_s + long.requests_per_s == pytest.approx(all_points.requests_per_s)
    assert all_points.output_tokens_per_s == pytest.approx(level.output_tokens_per_s)


def test_prompts_of_one_length_make_one_point():
    samples = [sample(), sample(prompt=101)]
    assert len(profile_points(samples, level_of(samples))) == 1
