"""The engine's door for asyncio: token requests in, token events out.

Steps run in a thread of the engine's own; events cross into the event loop of whoever asked.
"""

from __future__ import annotations

import asyncio
import logging
import threading
from collections import defaultdict
from collections.abc import AsyncIterator, Iterable
from pathlib import Path
from typing import NamedTuple

import torch

from perilune.core.env import num_threads
from perilune.core.types import EngineInfo, EngineStats, TokenEvent, TokenRequest
from perilune.engine.admission import admit
from perilune.engine.core import Emitted, EngineCore
from perilune.engine.sequence import TokenSequence
from perilune.model.api import load_model

logger = logging.getLogger(__name__)

FAILURE = "the engine has failed and serves no more; restart the server, its log has the reason"


class _Listener(NamedTuple):
    loop: asyncio.AbstractEventLoop
    events: asyncio.Queue[TokenEvent]


class AsyncEngine:
    """An `Engine` (see `core.protocols`) on a core. May serve several event loops at once."""

    def __init__(self, core: EngineCore, info: EngineInfo, *, threads: int | None = None) -> None:
        """Takes the core over and starts stepping it. `threads`: torch threads of a step."""
        self.info = info
        self._core = core
        self._threads = threads
        self._listeners: dict[TokenSequence, _Listener] = {}
        self._thread = threading.Thread(target=self._run, name="perilune-engine", daemon=True)
        self._thread.start()

    def stats(self) -> EngineStats:
        return self._core.stats()

    async def generate(self, request: TokenRequest) -> AsyncIterator[TokenEvent]:
        """As `Engine.generate`; raises EngineClosedError after `close` or a fatal fault."""
        sequence = admit(request, self.info)
        events: asyncio.Queue[TokenEvent] = asyncio.Queue()
        # Known before it is added: the first event may come before `add` returns.
        self._listeners[sequence] = _Listener(asyncio.get_running_loop(), events)
        try:
            self._core.add(sequence)
            while True:
                event = await events.get()
                yield event
                if event.finish_reason is not None:
                    return
        finally:
            self._listeners.pop(sequence, None)
            self._core.abort(sequence)

    async def close(self) -> None:
        """Ends every open request with an `error` event, frees everything, stops the thread."""
        self._send(self._core.close())
        await asyncio.to_thread(self._thread.join)

    def _run(self) -> None:
        try:
            if self._threads is not None:
                torch.set_num_threads(self._threads)
            while self._core.wait_for_work():
                self._send(self._step())
        except BaseException:
            # Without this thread nobody would ever answer what is open or comes later.
            logger.critical("the engine's thread ends", exc_info=True)
            self._send(self._core.close(FAILURE))

    def _step(self) -> list[Emitted]:
        try:
            return self._core.step()
        except torch.AcceleratorError:
            raise  # the device's context is lost: every later step would fail as well
        except Exception:
            # Whatever else a step raises, the requests in it end with an answer, and the engine
            # goes on with the next ones.
            logger.exception("a step failed; every open request ends with an error")
            return self._core.fail("the engine failed while it ran the model")

    def _send(self, emitted: Iterable[Emitted]) -> None:
        """Hands each event loop its events in one go; waking a loop costs more than an event."""
        by_loop: dict[asyncio.AbstractEventLoop, list[Emitted]] = defaultdict(list)
        for item in emitted:
            listener = self._listeners.get(item.sequence)
            if listener is not None:
                by_loop[listener.loop].append(item)
        for loop, items in by_loop.items():
            try:
                loop.call_soon_threadsafe(self._deliver, items)
            except RuntimeError:  # the loop was closed with its iterators still open
                for item in items:
                    self._core.abort(item.sequence)
                    self._listeners.pop(item.sequence, None)

    def _deliver(self, items: Iterable[Emitted]) -> None:
        for sequence, event in items:
            listener = self._listeners.get(sequence)
            if listener is not None:
                listener.events.put_nowait(event)


def open_engine(
    model_dir: str | Path,
    *,
    max_running: int = 32,
    max_waiting: int = 256,
    prefill_budget: int | None = None,
    threads: int | None = None,
    device: str = "cpu",
    dtype: str = "float32",
    progress: bool = False,
) -> AsyncEngine:
    """Loads a checkpoint directory and starts an engine on it; its name is the directory's.

    `prefill_budget`: prompt tokens of a step, by default 256 on a CPU and 4096 on a GPU, which
    fewer would leave idle.
    `threads`: torch threads, by default what PERILUNE_THREADS says, else torch's choice.
    `progress` shows a bar while weights are loaded.

    Raises:
        ConfigError, CheckpointError, UnsupportedError: as `perilune.model.api.load_model`.
    """
    loaded = load_model(model_dir, device=device, dtype=dtype, progress=progress)
    if prefill_budget is None:
        prefill_budget = 256 if loaded.device.type == "cpu" else 4096
    core = EngineCore(
        loaded.model,
        device=loaded.device,
        max_running=max_running,
        max_waiting=max_waiting,
        prefill_budget=prefill_budget,
    )
    info = EngineInfo(
        model_id=Path(model_dir).resolve().name,
        vocab_size=loaded.config.vocab_size,
        max_context=loaded.config.max_position_embeddings,
        eos_ids=loaded.config.eos_ids,
        details={"device": str(loaded.device), "dtype": dtype, "max_running": max_running},
    )
    return AsyncEngine(core, info, threads=num_threads() if threads is None else threads)
