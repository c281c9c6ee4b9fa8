"""The engine's process is killed again and again: nobody else loses anything, nothing is left."""

from __future__ import annotations

import asyncio
import gc
import os
import signal
import tempfile
import threading
from collections.abc import Sequence
from pathlib import Path

import pytest
from process_cores import BREAKING, token

from perilune.core.types import TokenEvent, TokenRequest
from perilune.engine.client import EngineClient
from perilune.engine.line import CRASHED
from perilune.engine.restarts import RestartPolicy
from perilune.engine.supervisor import Supervisor

NUM_KILLS = int(os.environ.get("KILLS", "25"))
NUM_STREAMS, NUM_LATE = 5, 3
MANY = 100_000


def request_of(number: int, max_tokens: int) -> TokenRequest:
    prompt_ids = (number % BREAKING.start,)
    return TokenRequest(request_id=str(number), prompt_ids=prompt_ids, max_tokens=max_tokens)


class Stream:
    """Reads one request to its end."""

    def __init__(self, engine: EngineClient, request: TokenRequest) -> None:
        self.request = request
        self.events: list[TokenEvent] = []
        self.begun = asyncio.Event()
        self.task = asyncio.create_task(self._read(engine))

    async def _read(self, engine: EngineClient) -> None:
        async for event in engine.generate(self.request):
            self.events.append(event)
            self.begun.set()

    def check_tokens(self) -> None:
        ids = [e.token_id for e in self.events if e.token_id is not None]
        assert ids == [token(self.request, i) for i in range(len(ids))]

    def check_crashed(self) -> None:
        *tokens, last = self.events
        assert tokens
        assert (last.token_id, last.finish_reason, last.error) == (None, "error", CRASHED)
        assert all(event.finish_reason is None for event in tokens)
        self.check_tokens()

    def check_complete(self) -> None:
        assert len(self.events) == self.request.max_tokens
        assert self.events[-1].finish_reason == "length"
        self.check_tokens()


def held() -> dict[str, int]:
    """What this process holds that could leak."""
    gc.collect()
    return {
        "descriptors": len(os.listdir("/proc/self/fd")),
        "threads": threading.active_count(),
        "tasks": len(asyncio.all_tasks()),
        "children": len(children()),
        "files": len(os.listdir(tempfile.gettempdir())),
    }


def children() -> Sequence[str]:
    """Process ids, zombies among them."""
    tasks = Path("/proc/self/task").iterdir()
    return [pid for task in tasks for pid in (task / "children").read_text().split()]


@pytest.fixture(autouse=True)
def own_temporary_folder(tmp_path, monkeypatch) -> None:
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))


async def kill_mid_stream(supervisor: Supervisor, engine: EngineClient, round_number: int) -> None:
    """With streams open, one of which nobody reads, and requests coming while it is down."""
    base = 10 * round_number
    streams = [Stream(engine, request_of(base + i, MANY)) for i in range(NUM_STREAMS)]
    unread = engine.generate(request_of(base + 9, MANY))
    await anext(unread)
    for stream in streams:
        await stream.begun.wait()
    assert supervisor.pid is not None
    os.kill(supervisor.pid, signal.SIGKILL)
    late = [Stream(engine, request_of(base + 5 + i, 7)) for i in range(NUM_LATE)]
    for stream in (*streams, *late):
        await stream.task
    for stream in streams:
        stream.check_crashed()
    for stream in late:
        stream.check_complete()
    rest = [event async for event in unread]
    assert [event.finish_reason for event in rest] == [None] * (len(rest) - 1) + ["error"]


def test_no_request_breaks_an_engine_by_itself() -> None:
    """However many rounds there are, what ends an engine is the kill."""
    asked = {i for number in range(10_000) for i in request_of(number, 1).prompt_ids}
    assert asked.isdisjoint(BREAKING)


@pytest.mark.usefixtures("cores_in_reach")
def test_kills_mid_stream_lose_no_other_request_and_leave_nothing(caplog) -> None:
    async def run() -> None:
        policy = RestartPolicy(quick_s=0)  # here every death is quick
        supervisor = Supervisor("process_cores:open_core", policy=policy, step_s=0.001)
        before = held()
        await supervisor.start()
        engine = EngineClient(supervisor)
        serving = None
        for round_number in range(NUM_KILLS):
            await kill_mid_stream(supervisor, engine, round_number)
            serving = serving or held()
        assert engine.stats().restarts_total == NUM_KILLS
        assert engine.stats().failure is None
        assert held() == serving
        await engine.close()
        assert held() == before

    asyncio.run(run())
    assert caplog.text.count("was killed by SIGKILL") == NUM_KILLS
