"""The step loop's body: schedule, launch, read the tokens, commit.

`add` and `abort` may be called from any thread, `step` from one at a time. The lock is not held
while the model runs.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch

from perilune.core.types import EngineStats, FinishReason, TokenEvent
from perilune.engine.batch import Chunk, Plan
from perilune.engine.cache_tiers import Tiers
from perilune.engine.cost_model import CostModel
from perilune.engine.decode_graphs import Capacity, DecodeGraphs
from perilune.engine.draft_graphs import WIDTHS, DraftGraphs
from perilune.engine.errors import EngineClosedError, error_event
from perilune.engine.flight import Flight
from perilune.engine.lane import Lane, lane_of
from perilune.engine.pooled_memory import PooledMemory, Room
from perilune.engine.retention import Retention
from perilune.engine.runner import Runner
from perilune.engine.sampler import Sampled
from perilune.engine.scheduler import Scheduler
from perilune.engine.sequence import TokenSequence
from perilune.engine.speculation import ANY_WIDTH, Drafter, Speculation
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
        drafter: Drafter | None = None,
        device: torch.device | str = "cpu",
        max_running: int = 32,
        max_waiting: int = 256,
        prefill_budget: int = 256,
        max_context: int | None = None,
        graphs: bool | None = None,
        new_graphs: Callable[..., DecodeGraphs] = DecodeGraphs,
        run_ahead: bool = True,
        lane: Lane | None = None,
    ) -> None:
        """`room`: by default for 128 pages and two slots a running sequence.
        `cost`: of the model, by which the prefix cache weighs what it keeps; None: it is off.
        `retention`: where in a prompt it keeps states.
        `tiers`: what it has beside the card.
        `drafter`: guesses tokens, which are verified together; None: nobody does.
        `max_context`: tokens of one sequence, for which graphs have room; by default what fits.
        `graphs`: whether steps without prompts are captured and replayed; None: on a GPU.
        `new_graphs`: makes them, of what `DecodeGraphs` takes.
        `run_ahead`: where there are graphs, a step is launched before the one before has ended.
        `lane`: where steps run, by default the device's own.

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
        place = torch.device(device)
        lane = lane or lane_of(place)
        self._graphs: DecodeGraphs | None = None
        self._draft_graphs: DraftGraphs | None = None
        if place.type == "cuda" if graphs is None else graphs:
            longest = memory.max_tokens if max_context is None else max_context + WIDTHS[-1]
            num_pages = memory.num_pages(min(longest, memory.max_tokens))
            capacity = Capacity(max_running, num_pages)
            self._graphs = new_graphs(model, memory.pools, capacity, place, lane)
            if drafter is not None:
                self._draft_graphs = self._graphs.for_drafts()
        self._runner = Runner(model, memory.pools, place, lane, self._graphs, self._draft_graphs)
        self._runs_ahead = run_ahead
        self._flight: Flight | None = None
        """The step that was launched ahead."""
        widths = ANY_WIDTH if self._draft_graphs is None else WIDTHS
        rests = run_ahead and self._graphs is not None
        self._speculation = Speculation(drafter, widths, rests=rests)
        self._changed = threading.Condition()
        self._closed = False
        self._failure: str | None = None
        self._prompt_tokens = 0
        self._generated_tokens = 0

    def warm_up(self) -> None:
        """Captures all graphs, which would otherwise hold up the first steps. Before any step."""
        if self._graphs is not None:
            self._graphs.warm_up()
        if self._draft_graphs is not None:
            self._draft_graphs.warm_up()

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
        """Ends an open sequence (`Scheduler.abort`): nobody hears of it any more."""
        with self._changed:
            self.scheduler.abort(sequence)

    def step(self) -> list[Emitted]:
        """Reads one step's tokens, of the step in flight or of one that it launches; nothing
        happens without an open sequence. Where it can it launches the next one before that, so that
        the device need not wait for the host (`Scheduler.ahead`).

        Raises whatever the model raises. The caches are then in an unknown state: `fail` has to
        follow.
        """
        flight = self._flight or self._launch_next()
        if flight is None:
            self.scheduler.memory.wait()
            return []
        self._flight = self._launch_ahead(flight.plan)
        return self._commit(flight.plan, self._runner.read(flight))

    def fail(self, message: str) -> list[Emitted]:
        """Ends every open sequence with an `error` event that says `message`."""
        with self._changed:
            self._flight = None
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
        memory, speculation = self.scheduler.memory, self._speculation
        with self._changed:
            return EngineStats(
                num_running=len(self.scheduler.running),
                num_waiting=len(self.scheduler.waiting),
                prompt_tokens_total=self._prompt_tokens + memory.hit_tokens,
                prefix_cache_hit_tokens_total=memory.hit_tokens,
                drafted_tokens_total=speculation.num_drafted,
                accepted_tokens_total=speculation.num_accepted,
                preemptions_total=self.scheduler.num_preempted,
                generated_tokens_total=self._generated_tokens,
                cache_bytes=memory.used_bytes,
                failure=self._failure,
            )

    def _launch_next(self) -> Flight | None:
        with self._changed:
            decoding = self.scheduler.decoding
        drafts = self._speculation.propose(decoding)
        with self._changed:
            plan = self.scheduler.schedule(drafts)
        return self._runner.launch(plan) if plan.chunks else None

    def _launch_ahead(self, plan: Plan) -> Flight | None:
        decoding = [chunk.sequence for chunk in plan.decoding]
        graphs = self._graphs
        if graphs is None or not self._runs_ahead or not self._speculation.is_pausing(decoding):
            return None
        with self._changed:
            ahead = self.scheduler.ahead(plan, graphs.samples)
        if ahead is None:
            return None
        self._speculation.skip(decoding)
        return self._runner.launch(ahead)

    def _commit(self, plan: Plan, taken: Sequence[list[Sampled]]) -> list[Emitted]:
        """`taken`: the tokens of each chunk that count."""
        emitted = []
        with self._changed:
            for chunk, tokens in zip(plan.chunks, taken, strict=True):
                if self.scheduler.commit(chunk, tokens):
                    self._count(chunk, tokens)
                    emitted += _events(chunk.sequence, tokens)
        return emitted

    def _count(self, chunk: Chunk, tokens: Sequence[Sampled]) -> None:
        sequence = chunk.sequence
        if sequence.num_counted < sequence.prompt_len:
            end = chunk.num_cached + len(chunk.token_ids)
            self._prompt_tokens += sequence.count_prompt(end, is_cached=False)
        for token in tokens:
            if token.token_id is not None:
                self._generated_tokens += 1
        if chunk.num_drafted:
            self._speculation.note(sequence, chunk.num_drafted, len(tokens) - 1)


def _events(sequence: TokenSequence, tokens: Sequence[Sampled]) -> list[Emitted]:
    """Only the last one can end the sequence."""
    if not tokens:
        return []
    *others, last = tokens
    emitted = [Emitted(sequence, _event(sequence, token, None)) for token in others]
    emitted.append(Emitted(sequence, _event(sequence, last, sequence.finish_reason)))
    return emitted


def _event(sequence: TokenSequence, token: Sampled, reason: FinishReason | None) -> TokenEvent:
    request_id = sequence.request.request_id
    if token.token_id is None:
        return error_event(request_id, token.fault or "no token could be sampled")
    return TokenEvent(
        request_id=request_id,
        token_id=token.token_id,
        logprob=token.logprob,
        finish_reason=reason,
        cached_tokens=sequence.num_cached,
        written_tokens=sequence.written.num_tokens,
        pinned_tokens=sequence.num_pinned,
    )
