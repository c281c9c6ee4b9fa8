"""Where one sequence stands in its grammar, and which tokens may come next."""

from __future__ import annotations

import time
from collections.abc import Callable

from llguidance import LLMatcher

TOKEN_S = 0.1
"""CPU time that one token of a grammar may take. It is taken from the step that all sequences
share; an ordinary schema needs a thousandth of it."""

_STUCK = "NoExtensionBias"
_MAX_REASON_CHARS = 200


class GrammarState:
    """Mutable, for one thread at a time."""

    def __init__(
        self, matcher: LLMatcher, stop_ids: frozenset[int], on_fault: Callable[[], None]
    ) -> None:
        """`stop_ids`: every token that ends the sequence."""
        self.fault: str | None = None
        """Why no token can follow; set for good."""
        self._matcher = matcher
        self._stop_ids = sorted(stop_ids)
        self._on_fault = on_fault

    def allowed(self) -> bytearray | None:
        """A bit for every id of the vocabulary, the lowest first in each byte; None at a fault.

        Stop tokens are among them exactly where the grammar may end.
        """
        if self.fault is not None:
            return None
        begin_s = time.thread_time()
        mask = bytearray(self._matcher.compute_bitmask())
        fault = fault_of(self._matcher)
        if fault is None and time.thread_time() - begin_s > TOKEN_S:
            fault = "it takes too long"
        if fault is not None:
            self._fail(fault)
            return None
        may_end = self._matcher.is_accepting()
        for token_id in self._stop_ids:
            bit = 1 << (token_id & 7)
            mask[token_id >> 3] &= ~bit & 0xFF
            mask[token_id >> 3] |= bit * may_end
        return mask

    def advance(self, token_id: int) -> None:
        """Takes a token that was allowed."""
        if token_id not in self._stop_ids and not self._matcher.consume_token(token_id):
            self._fail(fault_of(self._matcher) or "the token is not in it")

    def _fail(self, reason: str) -> None:
        self.fault = f"the answer cannot go on in its grammar: {reason}"
        self._on_fault()


def fault_of(matcher: LLMatcher) -> str | None:
    """The library's reason in one line, if the matcher is in an error state."""
    if not matcher.is_error():
        return None
    reason = matcher.get_error().partition("\n")[0]
    return "no token can follow" if reason == _STUCK else reason[:_MAX_REASON_CHARS]
