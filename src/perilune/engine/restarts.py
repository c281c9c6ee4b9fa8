"""When an engine that has died is started again, and when no more."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class RestartPolicy:
    """A death is *quick* when the engine could not serve, or served for less than `quick_s`."""

    quick_s: float = 60.0
    first_delay_s: float = 0.5
    """Before the start that follows a second quick death in a row; the first has no delay."""
    max_delay_s: float = 30.0
    """The delay doubles with every further one, up to this."""
    max_quick: int = 8
    """So many in a row are the end."""
    wait_s: float = 10.0
    """How long a request waits for an engine that is being started. Less than the 15 s after which
    a stream sends its first sign of life, and with it a status that cannot be taken back."""
    close_s: float = 5.0
    """How long the process may take to end, for a step that is still running."""


class Deaths:
    """Counts quick deaths in a row."""

    def __init__(self, policy: RestartPolicy) -> None:
        self.num_quick = 0
        self._policy = policy

    def delay_after(self, lived_s: float) -> float | None:
        """Seconds to wait before the next start, None for no start any more."""
        policy = self._policy
        self.num_quick = self.num_quick + 1 if lived_s < policy.quick_s else 0
        if self.num_quick >= policy.max_quick:
            return None
        if self.num_quick < 2:
            return 0.0
        return min(policy.first_delay_s * 2 ** (self.num_quick - 2), policy.max_delay_s)
