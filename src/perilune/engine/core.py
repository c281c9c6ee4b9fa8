"""The step loop's body: schedule, run, sample, commit.

`add` and `abort` may be called from any thread, `step` from one at a time. The lock is not held
while the model runs.

Legend: B sampled sequences, V vocabulary.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import NamedTuple

import torch

from perilune.core.types import EngineStats, TokenEvent
from perilune.engine.batch import Chunk, Plan
from perilune.engine.cache_tiers import Tiers
from perilune.engine.cost_model import CostModel
from perilune.engine.errors import EngineClosedError, error_event
from perilune.engine.pooled_memory import PooledMemory, Room
from perilune.engine.retention import Retention
from perilune.engine.runner import Runner
from perilune.engine.sampler import Sampled, sample
from perilune.engine.scheduler import Scheduler
from perilune.engine.sequence import TokenSequence
from perilune.engine.step_model import StepModel

FEW_STATES = Retention(min_gap=16)


class Emitted(NamedTuple):
    sequence: TokenSequence
    event: TokenEvent


class EngineCore:
    """A model and its scheduler.

    `client` is the door to it for asyncio, `generate` the one for scripts.
    """

    def __init__(
        self,
        model: StepModel,
        *,
        room: Room | None = None,
        cost: CostModel | None = None,
        retention: Retention = FEW_STATES,
        tiers: Tiers | None = None,
        device: torch.device | str = "cpu",
        max_running: int = 32,
        max_waiting: int = 256,
        prefill_budget: int = 256,
    ) -> None:
        """`room`: by default for 128 pages and two slots a running sequence.
        `cost`: of the model, by which the prefix cache weighs what it keeps; None: it is off.
        `retention`: where in a prompt it keeps states.
        `tiers`: what it has beside the card.

        Raises:
            ConfigError: a number leaves no room to run.
        """
        room = room or Room(1 + 128 * max(max_running, 1), 2 * max(max_running, 1))
        memory = PooledMemory(model, room, cost, retention, tiers)
        self.scheduler = Scheduler(
            memory,
            max_running=max_running,
            max_waiting=max_waiting,
            prefill_budget=prefill_budget,
        )
        self._runner = Runner(model, memory.pools, torch.device(device))
        self._changed = threading.Condition()
        self._closed = False
        self._failure: str | None = None
        self._prompt_tokens = 0
        self._generated_tokens = 0

    def add(self, sequence: TokenSequence) -> None:
        """Opens a sequence.

        Raises:
            OverloadedError: the queue is full.
            EngineClosedError: `close` has been called; the message tells a failure from an end.
        """
        with self._changed:
            if self._closed:
                raise EngineClosedError(self._failure or "the engine is closed")
            self.scheduler.add(sequence)
            self._changed.notify_all()

    def abort(self, sequence: TokenSequence) -> None:
        """Frees an open sequence at once; none of its tokens is fed to a later step."""
        with self._changed:
            self.scheduler.remove(sequence, "abort")

    def step(self) -> list[Emitted]:
        """Runs one step; nothing happens without an open sequence.

        Raises whatever the model raises. The caches are then in an unknown state: `fail` has to
        follow.
        """
        plan = self._schedule()
        if not plan.chunks:
            self.scheduler.memory.wait()
            return []
        logits_BV = self._runner.run(plan)
        sampled = sample(logits_BV, [chunk.sequence.sampling for chunk in plan.sampled])
        return self._commit(plan, sampled)

    def fail(self, message: str) -> list[Emitted]:
        """Ends every open sequence with an `error` event that says `message`."""
        with self._changed:
            ended = self.scheduler.clear("error")
        return [Emitted(s, error_event(s.request.request_id, message)) for s in ended]

    def close(self, failure: str | None = None) -> list[Emitted]:
        """As `fail`, and from now on nothing is admitted; with `failure`, because of that."""
        with self._changed:
            self._closed = True
            self._failure = self._failure or failure
            self._changed.notify_all()
        emitted = self.fail(failure or "the engine is shutting down")
        with self._changed:
            self.scheduler.memory.close()
        return emitted

    def wait_for_work(self) -> bool:
        """Blocks until there is something to step (True) or the engine is closed (False)."""
        with self._changed:
            self._changed.wait_for(lambda: self._closed or self.scheduler.has_work)
            return not self._closed

    def stats(self) -> EngineStats:
        memory = self.scheduler.memory
        with self._changed:
            return EngineStats(
                num_running=len(self.scheduler.running),
                num_waiting=len(self.scheduler.waiting),
                prompt_tokens_total=self._prompt_tokens + memory.hit_tokens,
                prefix_cache_hit_tokens_total=memory.hit_tokens,
                preemptions_total=self.scheduler.num_preempted,
                generated_tokens_total=self._generated_tokens,
                cache_bytes=memory.used_bytes,
                failure=self._failure,
            )

    def _schedule(self) -> Plan:
        with self._changed:
            return self.scheduler.schedule()

    def _commit(self, plan: Plan, sampled: Sequence[Sampled]) -> list[Emitted]:
        emitted, tokens = [], iter(sampled)
        with self._changed:
            for chunk in plan.chunks:
                token = next(tokens) if chunk.is_sampled else None
                if self.scheduler.commit(chunk, token):
                    self._count(chunk, token)
                    if token is not None:
                        emitted.append(Emitted(chunk.sequence, _event(chunk.sequence, token)))
        return emitted

    def _count(self, chunk: Chunk, token: Sampled | None) -> None:
        end = chunk.num_cached + len(chunk.token_ids)
        self._prompt_tokens += chunk.sequence.count_prompt(end, is_cached=False)
        if token is not None and token.token_id is not None:
            self._generated_tokens += 1


def _event(sequence: TokenSequence, sampled: Sampled) -> TokenEvent:
    request_id = sequence.request.request_id
    if sampled.token_id is None:
        return error_event(request_id, sampled.fault or "no token could be sampled")
    return TokenEvent(
        request_id=request_id,
        token_id=sampled.token_id,
        logprob=sampled.logprob,
        finish_reason=sequence.finish_reason,
        cached_tokens=sequence.num_cached,
        written_tokens=sequence.num_written,
        pinned_tokens=sequence.num_pinned,
    )
