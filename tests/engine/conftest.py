"""Requests, and engines on the fake model.

Modules of this folder that are no tests are found under their plain names.
"""

from __future__ import annotations

import asyncio
import importlib.util
import sys
import threading
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch

from perilune.core.types import EngineInfo, EngineStats, TokenEvent, TokenRequest
from perilune.engine.admission import admit
from perilune.engine.client import EngineClient
from perilune.engine.core import EngineCore
from perilune.engine.cost_model import CostModel
from perilune.engine.fake_model import FakeModel
from perilune.engine.fake_pools import Fed
from perilune.engine.host import Opened
from perilune.engine.thread import EngineThread

for name in ("process_cores", "process_ends", "memory_machine", "schedules"):
    found = importlib.util.spec_from_file_location(name, Path(__file__).with_name(f"{name}.py"))
    sys.modules[name] = importlib.util.module_from_spec(found)
    found.loader.exec_module(sys.modules[name])

COST = CostModel(token_flops=1e6, pair_flops=10.0, row_bytes=8, state_bytes=64)
EOS_ID = 7
MAX_CONTEXT = 100


@pytest.fixture
def info() -> EngineInfo:
    return EngineInfo(
        model_id="fake", vocab_size=64, max_context=MAX_CONTEXT, eos_ids=frozenset({EOS_ID})
    )


class Gate:
    """Lets the model make `after` calls and holds it in the next one until it is opened."""

    def __init__(self, after: int) -> None:
        self._left = after
        self._reached = threading.Event()
        self._open = threading.Event()

    def __call__(self, step: Sequence[Fed]) -> None:
        self._left -= 1
        if self._left < 0:
            self._reached.set()
            assert self._open.wait(30)

    def open(self) -> None:
        self._open.set()

    async def wait_until_reached(self) -> None:
        assert await asyncio.to_thread(self._reached.wait, 30)


@dataclass
class Served:
    engine: EngineClient
    core: EngineCore
    model: FakeModel
    gates: list[Gate] = field(default_factory=list)

    def hold(self, after: int = 0) -> Gate:
        self.gates.append(Gate(after))
        self.model.on_call = self.gates[-1]
        return self.gates[-1]

    async def collect(self, request: TokenRequest) -> list[TokenEvent]:
        return [event async for event in self.engine.generate(request)]

    async def token_ids(self, request: TokenRequest) -> list[int | None]:
        return [event.token_id for event in await self.collect(request)]

    async def settled(self, condition: Callable[[EngineStats], bool]) -> EngineStats:
        """The first stats that the client has for which `condition` holds."""
        async with asyncio.timeout(30):
            while True:
                stats = self.engine.stats()
                if condition(stats):
                    return stats
                await asyncio.sleep(0.001)


Serve = Callable[..., AbstractAsyncContextManager[Served]]


@pytest.fixture
def serve(info: EngineInfo) -> Serve:
    @asynccontextmanager
    async def serve(**limits: int) -> AsyncIterator[Served]:
        model = FakeModel(info.vocab_size)
        core = EngineCore(model, cost=COST, **limits)
        opened = Opened(core=core, info=info, admit=admit, fatal=(torch.AcceleratorError,))
        engine = EngineClient(EngineThread(opened))
        served = Served(engine, core, model)
        try:
            yield served
        finally:
            for gate in served.gates:
                gate.open()
            await asyncio.wait_for(engine.close(), 30)

    return serve


@pytest.fixture
def cores_in_reach(monkeypatch: pytest.MonkeyPatch) -> None:
    """Engine processes, too, can import `process_cores`."""
    monkeypatch.syspath_prepend(str(Path(__file__).parent))


@pytest.fixture
def request_of() -> Callable[..., TokenRequest]:
    def request_of(prompt_ids: list[int], max_tokens: int = 8, **fields: Any) -> TokenRequest:
        fields = {"request_id": "r", "ignore_eos": True, **fields}
        return TokenRequest(prompt_ids=tuple(prompt_ids), max_tokens=max_tokens, **fields)

    return request_of
