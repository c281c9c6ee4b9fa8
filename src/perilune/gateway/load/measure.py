"""A load test from start to end: the server's facts, warm-up, one run for each load."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Iterable
from datetime import UTC, datetime
from itertools import islice
from typing import Any
from urllib.parse import urlsplit

import msgspec
from msgspec import Struct

from perilune.gateway.load.client import Asker, Client, connected
from perilune.gateway.load.errors import TargetError, WorkloadError
from perilune.gateway.load.generator import closed_loop, open_loop
from perilune.gateway.load.lateness import watched
from perilune.gateway.load.level import Level, Surroundings
from perilune.gateway.load.machine import this_machine, versions
from perilune.gateway.load.plan import LoadTest, nothing_left, requests_of, workload_text
from perilune.gateway.load.point import profile_points
from perilune.gateway.load.prefix_oracle import ideal_hits
from perilune.gateway.load.prompts import IdPrompts, PromptMaker, TextPrompts
from perilune.gateway.load.sample import Sample
from perilune.gateway.load.scrape import hits_between, samples_of
from perilune.gateway.load.summary import summed_up
from perilune.gateway.load.workload import (
    Fitting,
    Load,
    Request,
    schedule,
)
from perilune.gateway.profiles import LoadPoint, PerformanceProfile
from perilune.telemetry.energy import EnergyMeter, find_counters

FORMAT = "perilune-load-1"


class LoadResult(Struct, frozen=True, kw_only=True):
    """What --out holds."""

    format: str = FORMAT
    started_at: str
    config: dict[str, Any]
    model: str
    workload: str
    hardware: str
    generator: dict[str, str]
    """The machine the load came from."""
    versions: dict[str, str]
    """Of the load generator."""
    energy_missing: list[str]
    """Why there are no more counters of energy."""
    levels: list[Level]
    profile: PerformanceProfile | None
    """Of the loads that can be trusted; None without one."""


class _Run(Struct, frozen=True, kw_only=True):
    level: Level
    points: list[LoadPoint]


async def measure(
    test: LoadTest, *, api_key: str | None = None, tell: Callable[[str], None] = lambda text: None
) -> LoadResult:
    """Runs every load of `test`; `tell` hears what is being done.

    Raises:
        TargetError: the server cannot be reached, or refuses the warm-up.
        TraceError: the trace is wrong, as far as it is needed; a closed loop without a number of
            requests reads it as it goes.
        WorkloadError: nothing is left to be sent.
    """
    started_at = datetime.now(UTC)
    energy = find_counters()
    async with connected(test.url, api_key) as client:
        card = await client.model_card(test.model_id)
        test = dataclasses.replace(
            test,
            url=client.root,
            model_id=card.model_id,
            max_context=test.max_context or card.max_context,
        )
        await _warm_up(test, client, tell)
        runs = [
            await _run(test, client, number, EnergyMeter(energy.counters), tell)
            for number in range(len(test.loads))
        ]
    generator = this_machine()
    hardware = test.hardware or _hardware(test.url, generator)
    software = {"perilune load": versions()["perilune"]}
    fingerprints = {run.level.fingerprint for run in runs if run.level.fingerprint}
    if fingerprints:
        software["server"] = ", ".join(sorted(fingerprints))
    points = tuple(point for run in runs for point in run.points)
    when = started_at.isoformat(timespec="seconds")
    profile = PerformanceProfile(
        model=card.model_id,
        endpoint=test.url,
        measured_at=when,
        hardware=hardware,
        software=software,
        workload=workload_text(test),
        points=points,
    )
    return LoadResult(
        started_at=when,
        config=msgspec.json.decode(msgspec.json.encode(test, enc_hook=str)),
        model=card.model_id,
        workload=workload_text(test),
        hardware=hardware,
        generator=generator,
        versions=versions(),
        energy_missing=energy.missing,
        levels=[run.level for run in runs],
        profile=profile if points else None,
    )


def _hardware(url: str, generator: dict[str, str]) -> str:
    host = urlsplit(url).hostname or ""
    is_here = host in ("localhost", "::1") or host.startswith("127.")
    return "; ".join(generator.values()) if is_here else "not told"


async def _warm_up(test: LoadTest, client: Client, tell: Callable[[str], None]) -> None:
    """The first requests of the workload with other tokens, so that no prefix of them is kept."""
    tell(f"{test.model_id} at {client.root}: {test.num_warmup} requests to warm up")
    asker = _asker(test, client, "warm-up")
    requests = list(islice(requests_of(test), max(1, test.num_warmup)))
    if not requests:
        raise nothing_left(test)
    if test.num_warmup:
        for sample in await closed_loop(requests, asker, concurrency=1, seconds=None):
            if not sample.is_ok:
                raise TargetError(
                    f"{client.root} fails the warm-up ({sample.status}): {sample.message}"
                )


async def _run(
    test: LoadTest, client: Client, number: int, meter: EnergyMeter, tell: Callable[[str], None]
) -> _Run:
    load = test.loads[number]
    tell(str(load))
    requests = requests_of(test)
    # Each load gets tokens of its own: the cache must not know them from the one before.
    asker = _asker(test, client, f"load {number}")
    before = samples_of(await client.metrics())
    cpu_s = time.process_time()
    meter.update()
    used_before_j = dict(meter.used_j)
    async with watched(meter.update) as delays:
        samples = await _send(test, load, requests, asker)
    cpu_s = time.process_time() - cpu_s
    meter.update()
    after = samples_of(await client.metrics())
    if not samples:
        raise WorkloadError(f"no request of {workload_text(test)} came within the bounds given")
    answered = [sample.request.blocks for sample in samples if sample.is_ok]
    seen = Surroundings(
        loop_delays_s=[late.delay_s for late in delays if late.at >= samples[0].due_at],
        cpu_s=cpu_s,
        energy_j={name: used - used_before_j[name] for name, used in meter.used_j.items()},
        ideal_hits=ideal_hits(answered, test.cache_tokens),
        metric_hits=hits_between(before, after),
        num_left_out=requests.num_left_out,
    )
    level = summed_up(samples, load, test.limits, seen)
    points = profile_points(samples, level) if level.trusted else []
    return _Run(level=level, points=points)


async def _send(test: LoadTest, load: Load, requests: Fitting, asker: Asker) -> list[Sample]:
    due: Iterable[Request] = schedule(requests, load, test.bounds, test.seed)
    if load.concurrency is None or test.bounds.num_requests is not None:
        due = list(due)  # a trace that is wrong should not cost half a run first
    if load.concurrency is None:
        return await open_loop(due, asker)
    return await closed_loop(due, asker, concurrency=load.concurrency, seconds=test.bounds.seconds)


def _asker(test: LoadTest, client: Client, salt: str) -> Asker:
    seed = f"{test.seed} {salt}"
    prompts: PromptMaker = (
        IdPrompts(seed, test.first_id, test.end_id)
        if test.prompt_form == "ids"
        else TextPrompts(seed)
    )
    options: dict[str, Any] = {"temperature": test.temperature}
    if test.ignore_eos:
        options["ignore_eos"] = True
    return Asker(
        client,
        prompts,
        model_id=test.model_id or "",
        endpoint=test.endpoint,
        timeout_s=test.timeout_s,
        max_retries=test.max_retries,
        options=options,
    )
