"""Which drafts the next step verifies, and how long they are.

A draft is a guess of the tokens that a sequence will sample next. They are fed together with the
token that is fed anyway, and each row of logits is sampled as it would be without drafts: with the
sequence's own random number of that place. Rows count up to the first token that was guessed
wrong, so what comes out is the same whatever is drafted; drafts only decide how many tokens a step
gives. Nothing has to be corrected by rejection sampling (arXiv 2211.17192), whose drafts are
accepted more often where tokens are drawn, but whose tokens depend on the drafter.

Sequences whose logits depend on the tokens before (grammars, penalties) are not drafted for.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple, Protocol

from perilune.engine.draft_width import DraftWidth
from perilune.engine.prompt_lookup import PromptLookup
from perilune.engine.sequence import TokenSequence

MAX_ROWS = 32
"""Rows of all sequences in a step that verifies: beyond, products take longer by the row."""
ANY_WIDTH = range(1, MAX_ROWS)
PATIENCE, REST = 8, 3
"""After so many steps in a row for which nothing was found nobody looks for so many more: they can
be launched ahead."""


class Drafts(NamedTuple):
    width: int = 0
    """Drafted tokens that every decoding sequence has room for in the step."""
    by_sequence: Mapping[TokenSequence, list[int]] = {}
    """At most `width` of each."""


NO_DRAFTS = Drafts()


class Drafter(Protocol):
    """Guesses. Called by one thread at a time, between two steps."""

    def draft(self, wanted: Mapping[TokenSequence, int]) -> dict[TokenSequence, list[int]]:
        """Up to so many next tokens of each."""
        ...

    def forget(self, sequence: TokenSequence) -> None:
        """The sequence has ended, or is unknown."""
        ...


class LookupDrafter:
    """Looks every draft up in the sequence itself."""

    def __init__(self) -> None:
        self._lookups: dict[TokenSequence, PromptLookup] = {}

    def draft(self, wanted: Mapping[TokenSequence, int]) -> dict[TokenSequence, list[int]]:
        return {s: self._updated(s).draft(count) for s, count in wanted.items()}

    def forget(self, sequence: TokenSequence) -> None:
        self._lookups.pop(sequence, None)

    def _updated(self, sequence: TokenSequence) -> PromptLookup:
        lookup = self._lookups.get(sequence)
        if lookup is None:
            lookup = self._lookups[sequence] = PromptLookup(sequence.request.prompt_ids)
        for token_id in sequence.generated_ids[lookup.num_appended :]:
            lookup.append(token_id)
        return lookup


class FirstOf:
    """Asks one drafter after another, until there is a draft."""

    def __init__(self, *drafters: Drafter) -> None:
        self._drafters = drafters

    def draft(self, wanted: Mapping[TokenSequence, int]) -> dict[TokenSequence, list[int]]:
        found: dict[TokenSequence, list[int]] = {}
        for drafter in self._drafters:
            left = {s: count for s, count in wanted.items() if not found.get(s)}
            if left:
                found |= drafter.draft(left)
        return found

    def forget(self, sequence: TokenSequence) -> None:
        for drafter in self._drafters:
            drafter.forget(sequence)


class Speculation:
    """Asks a drafter for as much as lately came true."""

    def __init__(
        self,
        drafter: Drafter | None,
        widths: Sequence[int] = ANY_WIDTH,
        *,
        rests: bool = False,
    ) -> None:
        """`drafter` of None: nothing is ever drafted. `widths`: those that a step may have, rising;
        where there is none of the one that is wanted, rows cost the same with a longer draft.
        `rests`: looks only now and then where nothing is found."""
        self.num_drafted = 0
        self.num_accepted = 0
        self._drafter = drafter
        self._allowed = widths
        self._rest = REST if rests else 0
        self._num_missed = self._num_resting = 0
        self._widths: dict[TokenSequence, DraftWidth] = {}

    def propose(self, decoding: Sequence[TokenSequence]) -> Drafts:
        """For a step in which these sequences decode."""
        if self._drafter is None:
            return NO_DRAFTS
        for ended in [s for s in self._widths if s.finish_reason is not None]:
            del self._widths[ended]
            self._drafter.forget(ended)
        if not decoding or self._are_too_many(decoding):
            return NO_DRAFTS
        if self._num_resting:
            self.skip(decoding)
            return NO_DRAFTS
        wanted = {s: count for s in decoding if (count := self._wanted(s)) > 0}
        found = {s: ids for s, ids in self._drafter.draft(wanted).items() if ids} if wanted else {}
        self._note_found(bool(found), bool(wanted))
        width = _width([len(ids) for ids in found.values()], len(decoding))
        if width == 0:
            return NO_DRAFTS
        width = self._rounded(width, len(decoding))
        return Drafts(width, {s: ids[:width] for s, ids in found.items()})

    def is_pausing(self, decoding: Sequence[TokenSequence]) -> bool:
        """Whether a step in which these decode has no drafts, whatever they will have sampled."""
        if self._drafter is None or self._are_too_many(decoding):
            return True
        return self._num_resting > 0 or all(
            s.sampling.depends_on_output or ((width := self._widths.get(s)) and width.is_pausing)
            for s in decoding
        )

    def skip(self, decoding: Sequence[TokenSequence]) -> None:
        """Instead of `propose`, for a step of the pause."""
        if self._are_too_many(decoding):
            return
        self._num_resting = max(self._num_resting - 1, 0)
        for sequence in decoding:
            if sequence in self._widths:
                self._widths[sequence].next()

    def note(self, sequence: TokenSequence, num_drafted: int, num_right: int) -> None:
        """What became of a draft."""
        self.num_drafted += num_drafted
        self.num_accepted += num_right
        if sequence in self._widths:
            self._widths[sequence].note(num_drafted, num_right)

    def _note_found(self, is_found: bool, is_wanted: bool) -> None:
        if is_found:
            self._num_missed = 0
        elif is_wanted:
            self._num_missed += 1
            if self._num_missed >= PATIENCE:
                self._num_resting = self._rest

    def _wanted(self, sequence: TokenSequence) -> int:
        if sequence.sampling.depends_on_output:
            return 0
        width = self._widths.setdefault(sequence, DraftWidth()).next()
        if width:
            width = self._rounded(width, 1)
        return min(width, sequence.max_tokens - len(sequence.generated_ids) - 1)

    def _are_too_many(self, decoding: Sequence[TokenSequence]) -> bool:
        """For the shortest drafts."""
        return (1 + self._allowed[0]) * len(decoding) > MAX_ROWS

    def _rounded(self, width: int, num_sequences: int) -> int:
        """Up where it can be."""
        fitting = [w for w in self._allowed if (1 + w) * num_sequences <= MAX_ROWS]
        return next((w for w in fitting if w >= width), fitting[-1])


def _width(lengths: Sequence[int], num_sequences: int) -> int:
    """The width at which most drafted tokens are verified, of those at which at least half of the
    rows beside the first ones are drafts; 0: there is none."""
    best = 0
    most = 0
    for width in range(1, min(max(lengths, default=0), MAX_ROWS // num_sequences - 1) + 1):
        num_drafts = sum(min(length, width) for length in lengths)
        if num_drafts > most and 2 * num_drafts >= width * num_sequences:
            best, most = width, num_drafts
    return best
