"""What every answer and every chunk of it opens with."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from msgspec import UnsetType

from perilune import __version__
from perilune.core.types import ChatEvent
from perilune.gateway.response_types import Answer, UsageBody

Numbered = tuple[int, ChatEvent]
"""An event with the index of the choice that it belongs to."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AnswerHead:
    id: str
    model: str
    created: int = field(default_factory=lambda: int(time.time()))

    def answer(
        self, kind: str, choices: Sequence[Any], usage: UsageBody | UnsetType | None
    ) -> Answer:
        return Answer(
            id=self.id,
            object=kind,
            created=self.created,
            model=self.model,
            system_fingerprint=f"perilune-{__version__}",
            choices=list(choices),
            usage=usage,
        )
