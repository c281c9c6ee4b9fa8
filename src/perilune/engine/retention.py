"""Where in a prompt a state is kept.

A KDA state cannot be cut back, so a later request can go on only from a token count at which one
was kept. Each costs a slot, as much memory as thousands of rows: few, well chosen ones.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from perilune.core.errors import ConfigError
from perilune.engine.chances import Reason


class Cut(NamedTuple):
    num_tokens: int
    reason: Reason


@dataclass(frozen=True, slots=True, kw_only=True)
class Retention:
    """Which token counts of a prompt are worth a state."""

    interval: int = 0
    """At every multiple; 0: none. It bounds what is recomputed where a prompt branches off."""
    align: int = 0
    """At the last multiple below the prompt's end; 0: none. A conversation is often taken up a few
    tokens before the last prompt's end, where the template renders the answer's head anew."""
    min_gap: int = 1
    """Least distance from the hit and from each other; of two that are closer, the one of lower
    rank is left out. The prompt's end is always kept, and so is the aligned one however near to
    it: it is for prompts that come back without the last few tokens."""
    max_cuts: int = 8
    """Most states of one prompt, its end included."""

    def __post_init__(self) -> None:
        if self.interval < 0 or self.align < 0 or self.min_gap < 1 or self.max_cuts < 1:
            raise ConfigError(
                "interval and align must be at least 0, min_gap and max_cuts at least 1; got "
                f"{self.interval}, {self.align}, {self.min_gap} and {self.max_cuts}"
            )


def cuts(
    prompt_len: int,
    hit_len: int,
    branch_points: Sequence[int],
    retention: Retention,
    marks: Sequence[int] = (),
) -> list[Cut]:
    """Token counts, rising, after which the prefill of `prompt_len - hit_len` tokens keeps a state.

    All lie in (hit_len, prompt_len). By rank: the prompt's end, which is one token early, because
    the logits of the last one have to be computed in any case and a repeated prompt can then hit as
    well; `marks` (where the request's author expects others to go on: the end of a system prompt,
    of the last message); `branch_points` (`Hit.branch_points`: the second sighting of a shared
    prefix), the longest first; the aligned end; multiples of the interval, spread evenly where
    they are too many.

    Pure. The kernels cut after any token (`kernels.common.packing.Cuts`).
    """
    end = prompt_len - 1
    if end <= hit_len:
        return []
    ranked = [Cut(mark, "mark") for mark in sorted(marks, reverse=True)]
    ranked += [Cut(point, "branch") for point in sorted(branch_points, reverse=True)]
    if retention.align:
        ranked.append(Cut(end // retention.align * retention.align, "aligned"))
    chosen = _admit(ranked, [Cut(end, "end")], hit_len, retention)
    if retention.interval:
        first = (hit_len // retention.interval + 1) * retention.interval
        multiples = range(first, end, retention.interval)
        spread = _spread(multiples, retention.max_cuts - len(chosen))
        chosen = _admit([Cut(at, "interval") for at in spread], chosen, hit_len, retention)
    return sorted(chosen)


def cuts_within(cuts: Iterable[Cut], start: int, end: int) -> tuple[int, ...]:
    """Those of a chunk that computes the tokens `start` to `end`, counted from `start`."""
    return tuple(cut.num_tokens - start for cut in cuts if start < cut.num_tokens <= end)


def _admit(
    ranked: Iterable[Cut], chosen: Sequence[Cut], hit_len: int, retention: Retention
) -> list[Cut]:
    """`chosen`, whose first one is the end, and those of `ranked` that there is room for."""
    admitted = list(chosen)
    for cut in ranked:
        others = admitted[1:] if cut.reason == "aligned" else admitted
        taken = [hit_len, *(other.num_tokens for other in others)]
        is_far = all(abs(cut.num_tokens - other) >= retention.min_gap for other in taken)
        is_inside = hit_len < cut.num_tokens < admitted[0].num_tokens
        if is_inside and is_far and len(admitted) < retention.max_cuts:
            admitted.append(cut)
    return admitted


def _spread(multiples: range, room: int) -> list[int]:
    """At most `room` of them, evenly, the last one always."""
    if not multiples or room <= 0:
        return []
    step = -(-len(multiples) // room)
    return list(multiples[::-1][::step])
