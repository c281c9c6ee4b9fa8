"""One sequence in flight: its tokens, its memory, its sampling."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from perilune.core.types import FinishReason, TokenRequest
from perilune.engine.holding import Holding
from perilune.engine.prefix_use import Written
from perilune.engine.sampling_state import SamplingState


@dataclass(slots=True, kw_only=True, eq=False)
class TokenSequence:
    """Mutable, compared by identity. Owned by the scheduler from `add` until it is finished."""

    request: TokenRequest
    stop_ids: frozenset[int]
    """Every token that ends the sequence, the model's end tokens included."""
    max_tokens: int
    """Tokens that may be generated: the request's limit, or what the context leaves."""
    sampling: SamplingState
    generated_ids: list[int] = field(default_factory=list)
    num_computed: int = 0
    """Tokens that its memory holds when all planned steps have run. A KDA state has no way back: a
    sequence that has lost its memory starts anew, at 0 or where a state was kept."""
    had_place: bool = False
    """In the batch: it counts as waiting in the queue only before."""
    held: Holding | None = None
    """Given when the first token is computed, taken at the end or when others need it more."""
    num_counted: int = 0
    """Prompt tokens that the engine's statistics count already."""
    num_cached: int = 0
    """Those of them that the prefix cache had."""
    written: Written = field(default_factory=Written)
    """What it has added to the prefix cache."""
    num_in_flight: int = 0
    """Steps that are planned and not committed."""
    num_pinned: int = 0
    """Prompt tokens that stay there for `request.pin_s`."""
    finish_reason: FinishReason | None = None
    prompt_len: int = field(init=False)

    def __post_init__(self) -> None:
        self.prompt_len = len(self.request.prompt_ids)

    @property
    def num_tokens(self) -> int:
        return self.prompt_len + len(self.generated_ids)

    @property
    def num_remaining(self) -> int:
        """Tokens that the model has to see before the next one can be sampled."""
        return self.num_tokens - self.num_computed

    @property
    def is_decoding(self) -> bool:
        """Only the token sampled last is to be fed."""
        return self.held is not None and bool(self.generated_ids) and self.num_remaining == 1

    @property
    def ends_next(self) -> bool:
        """The next token is the last one, whatever it is."""
        return len(self.generated_ids) + 1 == self.max_tokens

    def next_ids(self, count: int) -> list[int]:
        """The next `count` tokens that the model has to see."""
        start, end = self.num_computed, self.num_computed + count
        after = self.prompt_len
        ids = list(self.request.prompt_ids[start:end])
        return ids + self.generated_ids[max(start - after, 0) : max(end - after, 0)]

    def ids(self, count: int) -> np.ndarray:
        """The first `count` tokens, int32."""
        ids = np.array(self.request.prompt_ids[:count], np.int32)
        if count <= self.prompt_len:
            return ids
        return np.append(ids, np.array(self.generated_ids[: count - len(ids)], np.int32))

    def starts_like(self, other: TokenSequence, count: int) -> bool:
        """Whether the first `count` tokens of both prompts are the same, `count` being one at least
        and in both."""
        ours, theirs = self.request.prompt_ids, other.request.prompt_ids
        # The last one first: most prompts that begin alike differ there, and slices are copies.
        return ours[count - 1] == theirs[count - 1] and ours[:count] == theirs[:count]

    def count_prompt(self, end: int, *, is_cached: bool) -> int:
        """How many of the first `end` tokens are of the prompt and now here for the first time."""
        num_new = max(min(end, self.prompt_len) - self.num_counted, 0)
        self.num_counted += num_new
        self.num_cached += num_new * is_cached
        return num_new

    def append(self, token_id: int) -> None:
        """Takes a sampled token and decides whether it is the last one."""
        ids = self.generated_ids
        ids.append(token_id)
        self.finish_reason = self.end_at(token_id, len(ids))
        self.sampling.append(token_id)

    def end_at(self, token_id: int, count: int) -> FinishReason | None:
        """Why `token_id`, as the `count`-th generated token, would be the last one."""
        if token_id in self.stop_ids:
            return "stop"
        return "length" if count == self.max_tokens else None
