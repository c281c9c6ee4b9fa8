"""Usage of an answer with several choices."""

from __future__ import annotations

from perilune.core.types import Usage
from perilune.gateway.response_types import UsageBody, usage_body


class UsageSum:
    """Adds up the choices; a prompt counts once, however many choices answer it."""

    def __init__(self, *, choices_per_prompt: int) -> None:
        self._choices_per_prompt = choices_per_prompt
        self._total = Usage()

    def add(self, index: int, usage: Usage) -> None:
        """Adds the usage of choice `index`."""
        counts_prompt = index % self._choices_per_prompt == 0
        total = self._total
        self._total = Usage(
            prompt_tokens=total.prompt_tokens + usage.prompt_tokens * counts_prompt,
            completion_tokens=total.completion_tokens + usage.completion_tokens,
            reasoning_tokens=total.reasoning_tokens + usage.reasoning_tokens,
            cached_tokens=total.cached_tokens + usage.cached_tokens * counts_prompt,
            written_tokens=total.written_tokens + usage.written_tokens,
            pinned_tokens=total.pinned_tokens + usage.pinned_tokens * counts_prompt,
        )

    def body(self) -> UsageBody:
        return usage_body(self._total)
