"""One sequence in flight: its tokens, its cache, its sampling."""

from __future__ import annotations

from dataclasses import dataclass, field

from perilune.core.types import FinishReason, TokenRequest
from perilune.engine.sampling_state import SamplingState
from perilune.engine.step_model import StepCache


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
    """Tokens that the model has seen. It never sees one twice: a KDA state has no way back."""
    cache: StepCache | None = None
    """Made when the first token is computed, dropped at the end."""
    finish_reason: FinishReason | None = None

    @property
    def prompt_len(self) -> int:
        return len(self.request.prompt_ids)

    @property
    def num_tokens(self) -> int:
        return self.prompt_len + len(self.generated_ids)

    @property
    def num_remaining(self) -> int:
        """Tokens that the model has to see before the next one can be sampled."""
        return self.num_tokens - self.num_computed

    @property
    def is_decoding(self) -> bool:
        """The whole prompt is computed; only the token sampled last is to be fed."""
        return self.num_computed >= self.prompt_len

    def next_ids(self, count: int) -> list[int]:
        """The next `count` tokens that the model has to see."""
        start = self.num_computed
        if self.is_decoding:
            start -= self.prompt_len
            return self.generated_ids[start : start + count]
        return list(self.request.prompt_ids[start : start + count])

    def append(self, token_id: int) -> None:
        """Takes a sampled token and decides whether it is the last one."""
        self.generated_ids.append(token_id)
        self.sampling.append(token_id)
        if token_id in self.stop_ids:
            self.finish_reason = "stop"
        elif len(self.generated_ids) == self.max_tokens:
            self.finish_reason = "length"
