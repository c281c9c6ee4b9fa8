"""An engine in its own process: starting, dying in every way, being started again, ending."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
import uvloop
from process_cores import (
    EXIT,
    EXIT_AT_ONCE,
    FATAL,
    HANG,
    NONSENSE,
    RAISE,
    SEGFAULT,
    token,
)
from process_ends import exited

from perilune.core.errors import (
    CheckpointError,
    EngineError,
    OverloadedError,
    RequestError,
)
from perilune.core.types import SamplingParams, TokenEvent, TokenRequest
from perilune.engine import wire
from perilune.engine.client import EngineClient
from perilune.engine.errors import EngineClosedError, EngineRestartingError, WireError
from perilune.engine.host import FAILURE
from perilune.engine.line import CRASHED
from perilune.engine.restarts import Deaths, RestartPolicy
from perilune.engine.supervisor import Supervisor

pytestmark = pytest.mark.usefixtures("cores_in_reach")

AT_ONCE = RestartPolicy(quick_s=0)
MANY = 100_000


def request_of(*prompt_ids: int, max_tokens: int = 5, **fields) -> TokenRequest:
    return TokenRequest(request_id="r", prompt_ids=prompt_ids, max_tokens=max_tokens, **fields)


async def collect(engine: EngineClient, request: TokenRequest) -> list[TokenEvent]:
    return [event async for event in engine.generate(request)]


async def check_serves(engine: EngineClient) -> None:
    request = request_of(3, 4)
    events = await collect(engine, request)
    assert [event.token_id for event in events] == [token(request, i) for i in range(5)]


@asynccontextmanager
async def engine_of(
    factory: str = "open_core", policy: RestartPolicy = AT_ONCE, **options
) -> AsyncIterator[tuple[EngineClient, Supervisor]]:
    """Whatever happens meanwhile, nothing of it is left at the end."""
    before = num_sockets()
    supervisor = Supervisor(f"process_cores:{factory}", policy=policy, **options)
    try:
        await supervisor.start()
        yield EngineClient(supervisor), supervisor
    finally:
        await supervisor.close()
        assert supervisor.pid is None
        await asyncio.sleep(0)  # a transport closes its socket in the loop
        assert num_sockets() == before


async def until(condition: Callable[[], object]) -> None:
    async with asyncio.timeout(60):
        while True:
            if condition():
                return
            await asyncio.sleep(0.002)


def num_sockets() -> int:
    """Open in this process."""
    links = (os.path.realpath(entry) for entry in Path("/proc/self/fd").iterdir())
    return sum("socket:" in link for link in links)


def is_reaped(pid: int) -> bool:
    """Whether a child of ours is gone without a trace."""
    return not Path(f"/proc/{pid}").exists()


@pytest.mark.parametrize("run_in", [asyncio.run, uvloop.run], ids=["asyncio", "uvloop"])
def test_requests_are_served_side_by_side(run_in) -> None:
    async def run() -> None:
        async with engine_of() as (engine, _):
            assert engine.info.eos_ids == frozenset({1, 2})
            requests = [request_of(i, max_tokens=1 + i) for i in range(20)]
            answers = await asyncio.gather(*(collect(engine, r) for r in requests))
            for request, events in zip(requests, answers, strict=True):
                expected = [token(request, i) for i in range(request.max_tokens)]
                assert [event.token_id for event in events] == expected
                assert [event.finish_reason for event in events][-1] == "length"

    run_in(run())


@pytest.mark.parametrize(
    ("request_", "options", "error", "says"),
    [
        (request_of(), {}, RequestError, "empty"),
        (request_of(1), {"max_open": 0}, OverloadedError, "full"),
        (request_of(1, sampling=SamplingParams(seed=2**64)), {}, RequestError, "cannot be sent"),
        (request_of(1, stop_ids=frozenset({"x"})), {}, RequestError, "the request is wrong"),
        (request_of(*([2**31] * 2**24)), {}, RequestError, "too large"),
    ],
    ids=["empty", "full", "seed", "type", "size"],
)
def test_what_is_refused_is_raised_and_harms_nobody(request_, options, error, says) -> None:
    async def run() -> None:
        async with engine_of(**options) as (engine, _):
            with pytest.raises(error, match=says) as refused:
                await collect(engine, request_)
            assert type(refused.value) is error
            assert refused.value.retry_after_s == (2.5 if error is OverloadedError else None)
            if not options:
                await check_serves(engine)

    asyncio.run(run())


def test_a_long_prompt_crosses() -> None:
    async def run() -> None:
        async with engine_of() as (engine, _):
            request = request_of(*range(1000, 2**20), max_tokens=1)
            [event] = await collect(engine, request)
            assert event.token_id == token(request, 0)

    asyncio.run(run())


def test_leaving_a_generator_or_cancelling_its_task_aborts_in_the_engine() -> None:
    async def run() -> None:
        async with engine_of(step_s=0.001) as (engine, _):
            events = engine.generate(request_of(1, max_tokens=MANY))
            task = asyncio.create_task(collect(engine, request_of(2, max_tokens=MANY)))
            await anext(events)
            await until(lambda: engine.stats().num_running == 2)
            await events.aclose()
            await until(lambda: engine.stats().num_running == 1)
            task.cancel()
            await until(lambda: engine.stats().num_running == 0)
            await check_serves(engine)

    asyncio.run(run())


def test_a_reader_that_stands_still_holds_up_nobody_and_holds_its_own_tokens_only() -> None:
    async def run() -> None:
        async with engine_of() as (engine, _):
            slow = engine.generate(request_of(1, max_tokens=2000))
            await anext(slow)
            for _ in range(3):
                await check_serves(engine)
            await until(lambda: engine.stats().num_running == 0)
            assert len([event async for event in slow]) == 1999

    asyncio.run(run())


@pytest.mark.parametrize(
    ("prompt_id", "how"),
    [
        (EXIT, "ended with exit code 3"),
        (SEGFAULT, "was killed by SIGSEGV"),
        (FATAL, "ended with exit code 1"),
    ],
)
def test_a_death_ends_what_is_open_once_and_the_next_engine_serves(prompt_id, how, caplog) -> None:
    async def run() -> None:
        async with engine_of(step_s=0.005) as (engine, _):
            other = asyncio.create_task(collect(engine, request_of(8, max_tokens=MANY)))
            await until(lambda: engine.stats().num_running == 1)
            events = await collect(engine, request_of(prompt_id, max_tokens=MANY))
            for ended in (events, await other):
                assert [e.finish_reason for e in ended] == [None] * (len(ended) - 1) + ["error"]
                assert ended[-1].error == (FAILURE if prompt_id == FATAL else CRASHED)
            await check_serves(engine)
            assert engine.stats().restarts_total == 1
            assert engine.stats().failure is None

    asyncio.run(run())
    assert how in caplog.text


def test_a_request_that_the_engine_has_not_taken_up_goes_to_the_next_one(tmp_path) -> None:
    async def run() -> None:
        async with engine_of("open_dying_at_first_call", marker=str(tmp_path / "m")) as (engine, _):
            await check_serves(engine)
            assert engine.stats().restarts_total == 1

    asyncio.run(run())


def test_a_request_that_ends_two_engines_is_not_tried_on_a_third() -> None:
    async def run() -> None:
        async with engine_of() as (engine, _):
            [last] = await collect(engine, request_of(EXIT_AT_ONCE))
            assert (last.finish_reason, last.error) == ("error", CRASHED)
            await check_serves(engine)
            assert engine.stats().restarts_total == 2

    asyncio.run(run())


def test_an_engine_that_talks_nonsense_is_replaced(caplog) -> None:
    async def run() -> None:
        async with engine_of() as (engine, _):
            events = engine.generate(request_of(NONSENSE, max_tokens=MANY))
            *_, last = [event async for event in events]
            assert last.error == CRASHED
            await check_serves(engine)

    asyncio.run(run())
    assert "makes no sense" in caplog.text


def test_a_step_that_raises_is_no_death() -> None:
    async def run() -> None:
        async with engine_of() as (engine, _):
            *_, last = await collect(engine, request_of(RAISE, max_tokens=MANY))
            assert last.error == "the engine failed while it ran the model"
            await check_serves(engine)
            assert engine.stats().restarts_total == 0

    asyncio.run(run())


def test_requests_wait_for_the_next_engine_but_not_for_ever(tmp_path) -> None:
    async def run() -> None:
        patient = RestartPolicy(quick_s=0, wait_s=60)
        options = {"marker": str(tmp_path / "m"), "seconds": 1.0}
        async with engine_of("open_slowly_again", patient, **options) as (engine, supervisor):
            os.kill(supervisor.pid, signal.SIGKILL)
            await until(lambda: engine.stats().failure)
            assert "being started again" in engine.stats().failure
            await check_serves(engine)
            assert engine.stats().failure is None
        hasty = RestartPolicy(quick_s=0, wait_s=0.05)
        options = {"marker": str(tmp_path / "n"), "seconds": 60.0}
        async with engine_of("open_slowly_again", hasty, **options) as (engine, supervisor):
            os.kill(supervisor.pid, signal.SIGKILL)
            await until(lambda: engine.stats().failure)
            with pytest.raises(EngineRestartingError, match="being started again") as refused:
                await check_serves(engine)
            assert refused.value.status == 503
            assert refused.value.retry_after_s >= 1

    asyncio.run(run())


def test_delays_double_up_to_a_limit_and_a_long_life_forgives() -> None:
    policy = RestartPolicy(
        quick_s=10, first_delay_s=1, max_delay_s=5, max_quick=6, wait_s=0, close_s=0
    )
    deaths = Deaths(policy)
    assert [deaths.delay_after(9) for _ in range(6)] == [0, 1, 2, 4, 5, None]
    deaths = Deaths(policy)
    assert [deaths.delay_after(lived_s) for lived_s in (0, 0, 11, 0, 0)] == [0, 1, 0, 0, 1]


def test_after_too_many_quick_deaths_it_stays_failed_and_says_so(tmp_path, caplog) -> None:
    async def run() -> None:
        policy = RestartPolicy(first_delay_s=0.01, max_quick=4)
        marker = str(tmp_path / "m")
        async with engine_of("open_once", policy, marker=marker) as (engine, supervisor):
            os.kill(supervisor.pid, signal.SIGKILL)
            with pytest.raises(EngineClosedError, match="crashed 4 times in a row") as refused:
                await check_serves(engine)
            assert "a shard has gone" in str(refused.value)
            assert engine.stats().failure == str(refused.value)
            assert engine.stats().restarts_total == 3
            assert supervisor.pid is None
            with pytest.raises(EngineClosedError):
                await check_serves(engine)

    asyncio.run(run())
    assert "is not started again" in caplog.text


def test_another_checkpoint_does_not_take_the_place_of_the_first(tmp_path) -> None:
    async def run() -> None:
        policy = RestartPolicy(first_delay_s=0.01, max_quick=2)
        marker = str(tmp_path / "m")
        async with engine_of("open_changed", policy, marker=marker) as (engine, supervisor):
            os.kill(supervisor.pid, signal.SIGKILL)
            with pytest.raises(EngineClosedError, match="the checkpoint has changed"):
                await check_serves(engine)

    asyncio.run(run())


@pytest.mark.parametrize(
    ("factory", "error", "says"),
    [
        ("open_broken", EngineError, "RuntimeError: no such luck"),
        ("open_unreadable", OSError, "/weights: Permission denied"),
        ("open_without_extra", ModuleNotFoundError, "torch"),
        ("open_dying", EngineError, "ended before it could serve"),
        ("open_typo", EngineError, "open_typo"),
    ],
)
def test_what_keeps_the_first_engine_from_starting_is_raised(factory, error, says) -> None:
    async def run() -> None:
        async with engine_of(factory):
            pytest.fail("it started")

    with pytest.raises(error, match=says):
        asyncio.run(run())


def test_a_checkpoint_error_keeps_its_class(tmp_path) -> None:
    (tmp_path / "m").touch()

    async def run() -> None:
        async with engine_of("open_once", marker=str(tmp_path / "m")):
            pytest.fail("it started")

    with pytest.raises(CheckpointError, match="a shard has gone"):
        asyncio.run(run())


def test_an_engine_of_another_version_is_refused(monkeypatch) -> None:
    monkeypatch.setattr("perilune.engine.supervisor.VERSION", "0.0.1, wire 0")

    async def run() -> None:
        async with engine_of():
            pytest.fail("it started")

    with pytest.raises(WireError, match=f"'{wire.VERSION}', the server of '0.0.1, wire 0'"):
        asyncio.run(run())


def test_a_start_can_be_called_off() -> None:
    async def run() -> None:
        supervisor = Supervisor("process_cores:open_never")
        task = asyncio.create_task(supervisor.start())
        await until(lambda: supervisor.pid)
        pid = supervisor.pid
        task.cancel()
        await asyncio.wait([task])
        assert is_reaped(pid)
        await supervisor.close()

    asyncio.run(run())


def test_closing_ends_what_is_open_without_waiting_for_the_engine(caplog) -> None:
    async def run() -> None:
        policy = RestartPolicy(close_s=0.2)
        async with engine_of(policy=policy) as (engine, supervisor):
            pid = supervisor.pid
            events = engine.generate(request_of(HANG, max_tokens=MANY))
            await anext(events)
            os.kill(pid, signal.SIGSTOP)
            closing = asyncio.create_task(engine.close())
            last = await anext(events)
            assert (last.finish_reason, last.error) == ("error", "the engine is shutting down")
            assert not closing.done()
            await closing
            assert is_reaped(pid)
            with pytest.raises(EngineClosedError, match="closed"):
                await check_serves(engine)

    asyncio.run(run())
    assert caplog.text == ""


def test_closing_while_the_next_engine_is_being_started(tmp_path) -> None:
    async def run() -> None:
        options = {"marker": str(tmp_path / "m"), "seconds": 60.0}
        async with engine_of("open_slowly_again", **options) as (engine, supervisor):
            os.kill(supervisor.pid, signal.SIGKILL)
            await until(lambda: supervisor.num_restarts)
            waiting = asyncio.create_task(check_serves(engine))
            await asyncio.sleep(0)
            await engine.close()
            with pytest.raises(EngineClosedError):
                await waiting

    asyncio.run(run())


PARENT = """
import asyncio, sys
from perilune.core.types import TokenRequest
from perilune.engine.client import EngineClient
from perilune.engine.supervisor import Supervisor

async def main(factory, prompt_id):
    supervisor = Supervisor(f"process_cores:{factory}")
    starting = asyncio.create_task(supervisor.start())
    while supervisor.pid is None:
        await asyncio.sleep(0.001)
    if factory == "open_core":
        await starting
        request = TokenRequest(request_id="r", prompt_ids=(prompt_id,), max_tokens=100_000)
        await anext(EngineClient(supervisor).generate(request))
    print(supervisor.pid, flush=True)
    await asyncio.Event().wait()

asyncio.run(main(sys.argv[1], int(sys.argv[2])))
"""


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
@pytest.mark.parametrize(
    ("factory", "prompt_id"),
    [("open_core", 1), ("open_core", HANG), ("open_never", 0)],
    ids=["stepping", "hanging", "starting"],
)
def test_the_engine_does_not_outlive_the_process_that_started_it(
    factory, prompt_id, number
) -> None:
    env = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    command = [sys.executable, "-c", PARENT, factory, str(prompt_id)]
    with subprocess.Popen(command, env=env, stdout=subprocess.PIPE) as parent:
        pid = int(parent.stdout.readline())
        assert Path(f"/proc/{pid}").exists()
        parent.send_signal(number)
        parent.wait()
    assert exited(pid)


def test_signals_of_a_terminal_leave_the_engine_to_its_parent() -> None:
    async def run() -> None:
        async with engine_of() as (engine, supervisor):
            await check_serves(engine)
            for number in (signal.SIGINT, signal.SIGTERM):
                os.kill(supervisor.pid, number)
            await check_serves(engine)
            assert engine.stats().restarts_total == 0

    asyncio.run(run())
