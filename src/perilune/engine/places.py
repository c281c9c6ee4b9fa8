"""Who has a place in the batch, who waits for one, and whose turn it is.

The sequences of one request (several prompts, several choices) share its id. Requests take turns
for places, those of one tenant with those of others, and none holds more than three quarters of
them: many prompts do not starve one. A request of a higher priority comes before all that; between
two steps it takes the places of later ones, which wait again, with what they had in the cache.
"""

from __future__ import annotations

from collections import Counter

from perilune.core.errors import OverloadedError
from perilune.engine.sequence import TokenSequence

RETRY_AFTER_S = 1.0


class Places:
    """A place is empty only while nobody who waits may have it."""

    def __init__(self, max_running: int, max_waiting: int) -> None:
        self.running: dict[TokenSequence, None] = {}
        """In order of priority, and of age where that is equal."""
        self.waiting: dict[TokenSequence, None] = {}
        self._max_running = max_running
        self._max_per_request = max_running - max_running // 4
        self._max_waiting = max_waiting

    def add(self, sequence: TokenSequence) -> None:
        """Gives the sequence a place, or else one in the queue.

        Raises:
            OverloadedError: the queue is full.
        """
        self.waiting[sequence] = None
        self._fill()
        if sequence in self.waiting and self._queue_len > self._max_waiting:
            del self.waiting[sequence]
            raise OverloadedError(
                f"{len(self.running)} sequences run and {self._queue_len} wait already; "
                f"come back in {RETRY_AFTER_S:g} s",
                retry_after_s=RETRY_AFTER_S,
            )

    def free(self, sequence: TokenSequence) -> None:
        """Gives the place of a running sequence to whoever is next."""
        del self.running[sequence]
        self._fill()

    def displace(self) -> TokenSequence | None:
        """Gives one place to a waiting sequence of a higher priority; returns who has lost it, and
        waits in front of all others now."""
        if not self.is_displaced:
            return None
        last, _ = self.running.popitem()
        self.waiting = {last: None, **self.waiting}
        self._fill()
        return last

    @property
    def is_displaced(self) -> bool:
        """Whether the last of those that run has to make room."""
        if len(self.running) < self._max_running:
            return False
        first, last = self._next(), next(reversed(self.running))
        return first is not None and first.request.priority < last.request.priority

    def check(self) -> None:
        assert len(self.running) <= self._max_running
        assert self._queue_len <= self._max_waiting
        priorities = [s.request.priority for s in self.running]
        assert priorities == sorted(priorities)
        held = Counter(s.request.request_id for s in self.running)
        assert all(count <= self._max_per_request for count in held.values())
        assert len(self.running) == self._max_running or all(
            held[s.request.request_id] == self._max_per_request for s in self.waiting
        ), "a place is left empty"
        assert not self.running.keys() & self.waiting.keys()

    @property
    def _queue_len(self) -> int:
        return sum(not s.had_place for s in self.waiting)

    def _fill(self) -> None:
        while len(self.running) < self._max_running:
            first = self._next()
            if first is None:
                return
            del self.waiting[first]
            first.had_place = True
            running = sorted([*self.running, first], key=lambda s: s.request.priority)
            self.running = dict.fromkeys(running)

    def _next(self) -> TokenSequence | None:
        """Of the highest priority; of these of the tenant, and then the request, that holds the
        fewest places; of equals the one that waits the longest."""
        of_tenant = Counter(s.request.tenant for s in self.running)
        of_request = Counter(s.request.request_id for s in self.running)

        def turn(sequence: TokenSequence) -> tuple[int, int, int]:
            request = sequence.request
            return request.priority, of_tenant[request.tenant], of_request[request.request_id]

        may = (s for s in self.waiting if of_request[s.request.request_id] < self._max_per_request)
        return min(may, key=turn, default=None)
