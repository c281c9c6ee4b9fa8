"""What the next step computes: chunked prefill, decoding together, the end.

Every open sequence is either *running* (it has one of the `places` in the batch) or *waiting* for
one. A running sequence is given memory when its first tokens are computed: it computes its prompt
in chunks, then decodes. What a chunk needs is there before it is planned. No tensor is touched
here.

Running sequences stand in order of priority, and of age where that is equal; *the oldest* is the
first of them. Memory goes to the oldest. A decoding sequence that finds no page takes those of the
youngest (its own, if that is itself), which keeps its place and starts anew when there is room. A
prompt starts only where all of it fits, takes nothing from others unless nobody else could go on,
and none starts before one that had to be left out. So the oldest sequence always gets on.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from perilune.core.errors import ConfigError
from perilune.core.types import FinishReason
from perilune.engine.batch import Chunk, Plan
from perilune.engine.places import Places
from perilune.engine.pooled_memory import PooledMemory, Started
from perilune.engine.sampler import Sampled
from perilune.engine.sampling_state import SamplingState
from perilune.engine.sequence import TokenSequence
from perilune.engine.speculation import NO_DRAFTS, Drafts

UNKNOWN = 0
"""In the place of a token that only the device knows."""


class Scheduler:
    """Not thread-safe. Between two calls of `schedule` every planned chunk has to be committed,
    or all sequences removed by `clear`. `ahead` plans one step more before that."""

    def __init__(
        self,
        memory: PooledMemory,
        *,
        max_running: int,
        max_waiting: int,
        prefill_budget: int,
    ) -> None:
        """`prefill_budget`: prompt tokens a step; it bounds how long a decoding stream waits.

        Raises:
            ConfigError: a number is too small.
        """
        if max_running < 1 or max_waiting < 0 or prefill_budget < 1:
            raise ConfigError(
                "max_running and prefill_budget must be at least 1, max_waiting at least 0; got "
                f"{max_running}, {prefill_budget} and {max_waiting}"
            )
        self._places = Places(max_running, max_waiting)
        self._leaving: dict[TokenSequence, None] = {}
        """Aborted while steps are in flight that write their memory."""
        self.memory = memory
        self.num_preempted = 0
        """How often a sequence has lost its memory to an older one."""
        self._prefill_budget = prefill_budget
        self._may_start = True
        """Whether a sequence that is not in the latest plan could be in another one by now."""

    @property
    def running(self) -> dict[TokenSequence, None]:
        return self._places.running

    @property
    def waiting(self) -> dict[TokenSequence, None]:
        return self._places.waiting

    @property
    def has_work(self) -> bool:
        return bool(self.running)

    def add(self, sequence: TokenSequence) -> None:
        """Gives the sequence a place in the batch, or else in the queue.

        Raises:
            OverloadedError: the queue is full.
            PoolFullError: the prompt does not fit into the whole memory.
        """
        self.memory.refuse(sequence.prompt_len)
        # The token sampled last is never fed.
        room = self.memory.max_tokens - sequence.prompt_len + 1
        sequence.max_tokens = min(sequence.max_tokens, room)
        self._may_start = True
        self._places.add(sequence)

    @property
    def decoding(self) -> list[TokenSequence]:
        """Those that the next plan feeds one token, unless they lose their memory."""
        return [s for s in self.running if s.is_decoding]

    def schedule(self, drafts: Drafts = NO_DRAFTS) -> Plan:
        """Plans one step: a token for each decoding sequence, with its draft where there is memory
        for all drafts, and prompt tokens up to the budget.

        Half of the budget belongs to the oldest prompt, so that it always gets on; the rest goes
        to the shortest ones, so that a short prompt need not sit behind a long one.
        """
        self.memory.poll()
        while (displaced := self._places.displace()) is not None:
            if displaced.held is not None:
                self._preempt(displaced)
            self.memory.release(displaced)
        decoding = [
            self._chunk(s, 1)
            for s in list(self.running)
            if s.is_decoding and self._has_pages(s, 1, may_take=True)
        ]
        width = drafts.width if self._has_room(decoding, drafts.width) else 0
        if width:
            decoding = [_drafted(chunk, drafts, width) for chunk in decoding]
        prompts: list[Chunk] = []
        prefilling = [s for s in self.running if s.num_remaining]
        if prefilling:
            prompts = self._prefill_chunks(prefilling, is_alone=not decoding)
        prompts.sort(key=lambda chunk: -len(chunk.token_ids))
        # What is read from disk comes unasked.
        self._may_start = bool(prompts) or self.memory.restoring is not None
        return Plan(decoding, prompts, width)

    def ahead(self, plan: Plan, is_sampled: Callable[[SamplingState], bool]) -> Plan | None:
        """The step behind `plan`, which has been launched but is not committed: everybody who got a
        token there decodes it, without its being known here. A sequence for which it turns out to
        have been the last one is in vain in this step; what it leaves is the state after all of its
        tokens.

        None: `plan` has to be committed first. A prompt is to be computed or is under way, drafts
        are verified, memory is short, or a token is one that the host samples: `is_sampled` says
        whose the device does.
        """
        if plan.prefilling or plan.width or (self._may_start and self._is_awaited(plan)):
            return None
        self.memory.poll()
        places: list[tuple[int, TokenSequence]] = []
        for place, chunk in enumerate(plan.decoding):
            sequence = chunk.sequence
            if sequence not in self.running or sequence.ends_next:
                continue
            if not is_sampled(sequence.sampling):
                return None
            if not self.memory.grow(sequence, sequence.num_computed + 1):
                return None
            places.append((place, sequence))
        chunks = [self._next_chunk(s, place) for place, s in places]
        return Plan(chunks, []) if chunks else None

    def _is_awaited(self, plan: Plan) -> bool:
        """Whether anybody who is not in `plan` could be in one that `schedule` makes."""
        planned = {chunk.sequence for chunk in plan.decoding}
        return self._places.is_displaced or any(s not in planned for s in self.running)

    def _has_pages(self, sequence: TokenSequence, count: int, *, may_take: bool) -> bool:
        """For the next `count` tokens, with `may_take` at the cost of younger sequences; False even
        so: it was the youngest."""
        while not self.memory.grow(sequence, sequence.num_computed + count):
            if not may_take or not self._take_from_youngest(sequence):
                return False
        return True

    def _has_room(self, decoding: Sequence[Chunk], width: int) -> bool:
        """For drafts of all, without taking anything from anybody."""
        return bool(decoding) and all(
            self.memory.grow(c.sequence, c.num_cached + 1 + width) for c in decoding
        )

    def _take_from_youngest(self, sequence: TokenSequence) -> bool:
        """False: that was `sequence` itself, and others hold memory."""
        holders = [s for s in self.running if s.held is not None]
        if holders == [sequence]:
            self.memory.squeeze()
            return True
        self._preempt(holders[-1])
        return holders[-1] is not sequence

    def _preempt(self, sequence: TokenSequence) -> None:
        self.memory.keep(sequence)
        sequence.num_computed = 0
        self.num_preempted += 1

    def _prefill_chunks(self, prefilling: Sequence[TokenSequence], is_alone: bool) -> list[Chunk]:
        """`is_alone`: no other sequence gets on in this step."""
        oldest, *others = prefilling
        others.sort(key=lambda s: (s.request.priority, s.num_remaining))
        chunks: list[Chunk] = []
        left, may_start = self._prefill_budget, True
        for sequence in [oldest, *others]:
            if left == 0:
                break
            if sequence.held is None:
                if self._is_coming(sequence):
                    continue
                started = self._start(sequence) if may_start else Started.NO_ROOM
                may_start = started is not Started.NO_ROOM
                if started is not Started.YES:
                    continue
            count = min(sequence.num_remaining, left)
            if sequence is oldest:
                spare = left - sum(s.num_remaining for s in others)
                count = min(count, max(spare, (left + 1) // 2))
            if self._has_pages(sequence, count, may_take=is_alone and not chunks):
                chunks.append(self._chunk(sequence, count))
                left -= count
        return chunks

    def _is_coming(self, sequence: TokenSequence) -> bool:
        """Whether another is about to leave a state that `sequence` can start from: choices of one
        prompt come together, and need to read it only once."""
        least = self.memory.retention.min_gap
        for other in self.running:
            num_tokens = 0 if other.held is None else other.held.last_cut
            if least <= num_tokens < sequence.prompt_len and sequence.starts_like(
                other, num_tokens
            ):
                return True
        return False

    def _start(self, sequence: TokenSequence) -> Started:
        holders = [s for s in self.running if s.held is not None]
        reserved = sum(self.memory.num_missing(s) for s in holders)
        started = self.memory.start(sequence, reserved)
        if holders or started is not Started.NO_ROOM:
            return started
        self.memory.squeeze()
        started = self.memory.start(sequence, 0)
        if started is Started.NO_ROOM:
            self.memory.forget()
            started = self.memory.start(sequence, 0)
        return started

    def commit(self, chunk: Chunk, sampled: Sequence[Sampled]) -> bool:
        """Notes what the model has computed and, for a sampled chunk, the tokens: as many as its
        slot has moved on by if it was decoding.

        Returns False for a sequence that has left in the meantime: its tokens are nobody's. A
        sequence that ends here is removed.
        """
        sequence = chunk.sequence
        sequence.num_in_flight -= 1
        is_open = sequence in self.running
        if sampled and sampled[-1].token_id is None:
            # It may have ended before this step, and left what the step has broken.
            self.memory.disown(sequence)
            self._leaving.pop(sequence, None)
            if is_open:
                self._leave(sequence, "error")
        elif sequence.held is not None:
            if chunk.is_decoding:
                sequence.num_computed += len(sampled) - 1
            else:
                self.memory.publish(sequence)  # only prompts are cut
            if is_open:
                self._append(sequence, sampled)
            else:
                self._let_go(sequence, sampled)
        return is_open

    def _append(self, sequence: TokenSequence, sampled: Sequence[Sampled]) -> None:
        for token in sampled:
            assert token.token_id is not None
            if not sequence.generated_ids:
                self.memory.pin(sequence)
            sequence.append(token.token_id)
        if sequence.finish_reason is not None:
            self.memory.keep(sequence)
            self._leave(sequence, sequence.finish_reason)

    def _let_go(self, sequence: TokenSequence, sampled: Sequence[Sampled]) -> None:
        """Of an aborted sequence, whose slot has seen these tokens or will."""
        sequence.generated_ids += [t.token_id for t in sampled if t.token_id is not None]
        if sequence.num_in_flight == 0:
            del self._leaving[sequence]
            self.memory.keep(sequence, "abort")

    def abort(self, sequence: TokenSequence) -> None:
        """Ends a sequence and frees its place; one that is not open is left alone. What it has
        computed stays cached: who asks again goes on from there. Its memory is free when the steps
        in flight have been committed."""
        if sequence in self.waiting:
            del self.waiting[sequence]
            sequence.finish_reason = "abort"
        elif sequence in self.running:
            if sequence.num_in_flight:
                self._leaving[sequence] = None
            elif sequence.held is not None:
                self.memory.keep(sequence, "abort")
            else:
                self.memory.release(sequence)
            self._leave(sequence, "abort")

    def _leave(self, sequence: TokenSequence, reason: FinishReason) -> None:
        self._places.free(sequence)
        self._may_start = True
        sequence.finish_reason = reason

    def clear(self, reason: FinishReason) -> Sequence[TokenSequence]:
        """Ends every open sequence and returns them, oldest first; nothing of them is kept."""
        ended = [*self.running, *self.waiting]
        for sequence in ended:
            sequence.finish_reason = reason
        for sequence in (*ended, *self._leaving):
            self.memory.release(sequence)
        self.running.clear()
        self.waiting.clear()
        self._leaving.clear()
        self.memory.forget()
        return ended

    def check(self) -> None:
        """Asserts what must hold between two steps."""
        self._places.check()
        for s in self.waiting:
            assert s.finish_reason is s.held is None
            assert s.num_computed == 0
        for s in self.running:
            assert s.finish_reason is None
            # Of a step in flight the token is not known yet.
            assert s.num_remaining > 0 or (s.generated_ids and s.held is not None)
            assert s.num_remaining >= 0
            assert s.num_computed == 0 or s.held is not None
            assert s.held is None or not s.held.checkpoints, "a state is left unpublished"
            assert len(s.generated_ids) < s.max_tokens
        assert all(s.num_in_flight and s.finish_reason == "abort" for s in self._leaving)
        self.memory.check([*self.running, *self._leaving])

    def _chunk(self, sequence: TokenSequence, count: int) -> Chunk:
        held = sequence.held
        assert held is not None
        chunk = Chunk(
            sequence,
            sequence.next_ids(count),
            held.slot,
            held.pages,
            sequence.num_computed,
            self.memory.checkpoint(sequence, count),
            is_sampled=count == sequence.num_remaining,
            is_decoding=sequence.is_decoding,
        )
        sequence.num_computed += count
        sequence.num_in_flight += 1
        return chunk

    def _next_chunk(self, sequence: TokenSequence, source: int) -> Chunk:
        """Of the token that the step in flight samples in row `source`."""
        held = sequence.held
        assert held is not None
        at = held.slot, held.pages, sequence.num_computed
        sequence.num_computed += 1
        sequence.num_in_flight += 1
        return Chunk(sequence, [UNKNOWN], *at, (), True, True, source=source)


def _drafted(chunk: Chunk, drafts: Drafts, width: int) -> Chunk:
    """With its draft and what fills it up to the width: any token, none of which counts."""
    [last] = chunk.token_ids
    draft = drafts.by_sequence.get(chunk.sequence, [])
    filled = [last, *draft, *[last] * (width - len(draft))]
    return chunk._replace(token_ids=filled, num_drafted=len(draft))
