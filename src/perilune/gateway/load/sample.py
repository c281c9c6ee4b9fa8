"""What is known of one request that was sent."""

from __future__ import annotations

from dataclasses import dataclass, field

from perilune.gateway.load.workload import Request

OK = "ok"


@dataclass(slots=True, kw_only=True)
class Sample:
    """Times are those of one clock, in seconds.

    Every latency counts from `due_at`: a request that the generator or a full server sent late has
    waited, as a user would have.
    """

    request: Request
    due_at: float
    sent_at: float | None = None
    first_at: float | None = None
    """The first output came."""
    last_at: float | None = None
    """The last output came."""
    ended_at: float | None = None
    status: str = ""
    """`ok`, or in a few words how it failed, e.g. `http 503`."""
    message: str = ""
    """The server's own words about a failure."""
    is_censored: bool = False
    """It was given up: its latencies are at least what was waited."""
    num_429: int = 0
    """Answers with that status, also those after which it was sent again."""
    retry_after_s: float | None = None
    """As the last of these answers asked."""
    num_pieces: int = 0
    """Events of the stream with output in them."""
    gaps_s: list[float] = field(default_factory=list)
    """Between one such event and the next."""
    prompt_tokens: int | None = None
    cached_tokens: int | None = None
    output_tokens: int | None = None
    """These three as the server's usage has them."""
    fingerprint: str | None = None

    @property
    def is_ok(self) -> bool:
        return self.status == OK

    @property
    def lag_s(self) -> float | None:
        """How late the generator was."""
        return None if self.sent_at is None else self.sent_at - self.due_at

    @property
    def ttft_s(self) -> float | None:
        """To the first output; of a request given up before it, the time waited."""
        if self.first_at is not None:
            return self.first_at - self.due_at
        return self.e2e_s if self.is_censored else None

    @property
    def tpot_s(self) -> float | None:
        """Mean time of a token after the first one; None for an answer of one token."""
        if self.first_at is None or self.last_at is None or self.num_output < 2:
            return None
        return (self.last_at - self.first_at) / (self.num_output - 1)

    @property
    def e2e_s(self) -> float | None:
        return None if self.ended_at is None else self.ended_at - self.due_at

    @property
    def num_output(self) -> int:
        """Tokens of the answer; pieces of the stream where the server gives no usage."""
        return self.num_pieces if self.output_tokens is None else self.output_tokens

    @property
    def num_prompt(self) -> int:
        return self.request.prompt_tokens if self.prompt_tokens is None else self.prompt_tokens

    def saw_piece(self, at: float) -> None:
        """Output came."""
        if self.first_at is None:
            self.first_at = at
        elif self.last_at is not None:
            self.gaps_s.append(at - self.last_at)
        self.last_at = at
        self.num_pieces += 1

    def saw_finish(self, at: float) -> None:
        """The answer is complete; tokens without text may have come since the last piece."""
        if self.first_at is None:
            self.first_at = at
        self.last_at = at
