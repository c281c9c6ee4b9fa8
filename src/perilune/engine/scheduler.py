"""Who runs in the next step: admission, chunked prefill, decoding together, the end.

Every open sequence is either *running* (it has a place in the batch) or *waiting* for a place. A
running sequence first computes its prompt in chunks, then decodes. No tensor is touched here.

The sequences of one request (several prompts, several choices) share its id. Requests take turns
for places, and none holds more than three quarters of them: many prompts do not starve one.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from typing import NamedTuple

from perilune.core.errors import ConfigError, OverloadedError
from perilune.core.types import FinishReason
from perilune.engine.batch import Chunk, split_calls
from perilune.engine.sampler import Sampled
from perilune.engine.sequence import TokenSequence
from perilune.engine.step_model import StepCache

RETRY_AFTER_S = 1.0


class Plan(NamedTuple):
    """One step: the model calls to make, each with the chunks that go into it.

    Every decoding sequence is in it, so a running stream never waits for a prompt to end.
    """

    calls: list[list[Chunk]]

    @property
    def chunks(self) -> list[Chunk]:
        return [chunk for call in self.calls for chunk in call]

    @property
    def sampled(self) -> list[Chunk]:
        """The chunks that give a token, in the order of the runner's logits."""
        return [chunk for chunk in self.chunks if chunk.is_sampled]


class Scheduler:
    """Not thread-safe. Between two calls of `schedule` every planned chunk has to be committed,
    or all sequences removed by `clear`."""

    def __init__(
        self,
        new_cache: Callable[[], StepCache],
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
        self.running: dict[TokenSequence, None] = {}
        self.waiting: dict[TokenSequence, None] = {}
        self._new_cache = new_cache
        self._max_running = max_running
        self._max_per_request = max_running - max_running // 4
        self._max_waiting = max_waiting
        self._prefill_budget = prefill_budget

    @property
    def has_work(self) -> bool:
        return bool(self.running)

    @property
    def cache_bytes(self) -> int:
        return sum(s.cache.nbytes for s in self.running if s.cache is not None)

    def add(self, sequence: TokenSequence) -> None:
        """Gives the sequence a place in the batch, or else in the queue.

        Raises:
            OverloadedError: the queue is full.
        """
        self.waiting[sequence] = None
        self._fill_places()
        if sequence in self.waiting and len(self.waiting) > self._max_waiting:
            del self.waiting[sequence]
            raise OverloadedError(
                f"{len(self.running)} sequences run and {len(self.waiting)} wait already; "
                f"come back in {RETRY_AFTER_S:g} s",
                retry_after_s=RETRY_AFTER_S,
            )

    def _fill_places(self) -> None:
        """The request that holds the fewest places gets the next one; of equals the oldest does."""
        held = Counter(s.request.request_id for s in self.running)
        while self.waiting and len(self.running) < self._max_running:
            first = min(self.waiting, key=lambda s: held[s.request.request_id])
            if held[first.request.request_id] == self._max_per_request:
                return
            del self.waiting[first]
            self.running[first] = None
            held[first.request.request_id] += 1

    def schedule(self) -> Plan:
        """Plans one step: a token for each decoding sequence, and prompt tokens up to the budget.

        Half of the budget belongs to the oldest prompt, so that it always gets on; the rest goes
        to the shortest ones, so that a short prompt need not sit behind a long one.
        """
        chunks = [self._chunk(s, 1) for s in self.running if s.is_decoding]
        if len(chunks) < len(self.running):
            chunks += self._prefill_chunks([s for s in self.running if not s.is_decoding])
        return Plan(split_calls(chunks))

    def _prefill_chunks(self, prefilling: Sequence[TokenSequence]) -> list[Chunk]:
        oldest, *others = prefilling
        others.sort(key=lambda s: s.num_remaining)
        spare = self._prefill_budget - sum(s.num_remaining for s in others)
        first = min(oldest.num_remaining, max(spare, (self._prefill_budget + 1) // 2))
        chunks, left = [self._chunk(oldest, first)], self._prefill_budget - first
        for sequence in others:
            if left == 0:
                break
            chunks.append(self._chunk(sequence, min(sequence.num_remaining, left)))
            left -= len(chunks[-1].token_ids)
        return chunks

    def commit(self, chunk: Chunk, sampled: Sampled | None) -> bool:
        """Notes what the model has computed and, for a sampled chunk, the token.

        Returns False, and does nothing, for a sequence that has left in the meantime. A sequence
        that ends here is removed.
        """
        sequence = chunk.sequence
        if sequence not in self.running:
            return False
        sequence.num_computed += len(chunk.token_ids)
        if sampled is not None:
            if sampled.token_id is None:
                sequence.finish_reason = "error"
            else:
                sequence.append(sampled.token_id)
            if sequence.finish_reason is not None:
                self.remove(sequence, sequence.finish_reason)
        return True

    def remove(self, sequence: TokenSequence, reason: FinishReason) -> None:
        """Ends a sequence, frees its cache and its place; one that is not open is left alone."""
        if sequence in self.waiting:
            del self.waiting[sequence]
        elif sequence in self.running:
            del self.running[sequence]
            self._fill_places()
        else:
            return
        sequence.finish_reason = reason
        sequence.cache = None

    def clear(self, reason: FinishReason) -> Sequence[TokenSequence]:
        """Ends every open sequence and returns them, oldest first."""
        ended = [*self.running, *self.waiting]
        self.running.clear()
        self.waiting.clear()
        for sequence in ended:
            sequence.finish_reason = reason
            sequence.cache = None
        return ended

    def check(self) -> None:
        """Asserts what must hold between two steps."""
        assert len(self.running) <= self._max_running
        assert len(self.waiting) <= self._max_waiting
        held = Counter(s.request.request_id for s in self.running)
        assert all(count <= self._max_per_request for count in held.values())
        assert len(self.running) == self._max_running or all(
            held[s.request.request_id] == self._max_per_request for s in self.waiting
        ), "a place is left empty"
        assert not self.running.keys() & self.waiting.keys()
        for s in self.waiting:
            assert s.finish_reason is s.cache is None
            assert s.num_computed == len(s.generated_ids) == 0
        for s in self.running:
            assert s.finish_reason is None
            assert s.num_computed == (0 if s.cache is None else s.cache.length)
            assert s.num_remaining == 1 if s.is_decoding else s.num_remaining > 0
            assert bool(s.generated_ids) == s.is_decoding
            assert len(s.generated_ids) < s.max_tokens

    def _chunk(self, sequence: TokenSequence, count: int) -> Chunk:
        if sequence.cache is None:
            sequence.cache = self._new_cache()
        return Chunk(
            sequence,
            sequence.next_ids(count),
            sequence.cache,
            is_sampled=count == sequence.num_remaining,
            is_prompt=not sequence.is_decoding,
        )
