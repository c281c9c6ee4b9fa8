"""One step of a packed batch over pools, as its sequences on the host and as layers see it.

Legend: T tokens of the step, N sequences that decode, Q tokens of each, J pages of the longest,
M sequences that prefill, S latent rows that they attend to, E cuts, W - 1 inputs of a window,
I = E (W - 1) of these, O of them older than their chunk, R rows of logits.

Tokens lie back to back: Q of each `Decoding`, padded rows behind them, then those of each
`Prefilling`, in the order given. Layers read both ranges as views. Which range a sequence is in is
said here and never guessed from a length: one token that prefills is a chunk of one.

`make_step` does what depends on the schedule, once for all layers: it checks, copies two tensors to
the device (pinned, without waiting), and knows all shapes on the host. Nothing in a step reads from
the device. A captured graph of a step that only decodes runs whatever `Step.load` puts into the
buffers that it was captured with.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from torch import Tensor

from perilune.kernels.common.packing import Cuts, Packing

PAGE = 64
"""Tokens of a page of latents."""
SCRATCH_PAGE = 0
"""Padded rows write their latents here; no sequence may own it."""
NO_SLOT = -1
"""Of a padded row: it reads nothing, and no slot changes."""

Pages = Sequence[int] | np.ndarray
"""Ids in the order of a sequence's tokens. An int32 array is copied at memory speed; a list costs
some 50 ns a page in every step."""


class Decoding(NamedTuple):
    """A sequence that is fed its newest Q tokens, through the recurrent form."""

    slot: int
    """Of its recurrent state and window in every KDA layer: read and written."""
    pages: Pages
    """At least as many as its tokens need; those behind are not looked at."""
    num_tokens: int
    """Of the sequence, the Q of this step included: slot and pages hold `num_tokens - Q`."""


class Cut(NamedTuple):
    """A state that goes to a checkpoint while its sequence goes on."""

    after: int
    """Tokens of the chunk that it has seen, 1 to `num_new`."""
    slot: int
    """Gets state and window in every KDA layer. Nobody else's in this step."""


class Prefilling(NamedTuple):
    """A sequence that is fed its next tokens, through the chunked form."""

    slot: int
    """Of its state: read unless the sequence is new, and written."""
    pages: Pages
    num_cached: int
    """Tokens that slot and pages hold: one number for both. 0 says that the sequence is new: it
    starts from nothing, whatever they hold."""
    num_new: int
    cuts: Sequence[Cut] = ()
    """Rising."""
    num_logits: int = 1
    """Of how many of its last tokens logits are wanted: 0 where the prompt goes on in a later
    step, `num_new` for all."""


class DecodeRange(NamedTuple):
    """The N sequences that decode; a padded one has `NO_SLOT` and 0 tokens."""

    slot_N: Tensor
    """int64."""
    table_NJ: Tensor
    """int32 pages; behind a sequence's last one it is not read."""
    length_N: Tensor
    """int32 tokens, those of the step included."""
    keep_N: Tensor | None
    """int64: how many of its tokens each state moves on by; None: all. Zeros in a step that
    verifies drafts."""
    num_each: int
    """Q."""

    @property
    def num_tokens(self) -> int:
        return self.slot_N.shape[0] * self.num_each


class WindowCuts(NamedTuple):
    """Where the windows at cuts come from, oldest input first. All int64."""

    token_I: Tensor
    """Tokens of the range; any where the input is older than its chunk."""
    place_O: Tensor
    """Of the I inputs those that are."""
    carried_O: Tensor
    """Their rows in the windows that the chunks start from, [M (W - 1), C]."""


class PrefillRange(NamedTuple):
    """M chunks that run together."""

    packing: Packing
    """New tokens."""
    keys: Packing
    """Rows that each chunk attends to: those cached and its own."""
    slot_M: Tensor
    """int64."""
    new_M: Tensor | None
    """bool; None: no sequence is new."""
    all_new: bool
    key_row_S: Tensor | None
    """int64 rows, counted through all pages; None: all are new, and their own rows are all."""
    cuts: Cuts | None
    """As `kda_chunk` takes them; None: none."""
    cut_slot_E: Tensor
    """int64."""
    window_cuts: WindowCuts


class Step(NamedTuple):
    """On the device; valid for all layers and one pass."""

    decode: DecodeRange | None
    prefill: tuple[PrefillRange, ...]
    """One behind another. On a GPU all chunks are in one; on a CPU, whose ops fill chunks up to the
    longest, unlike ones are apart."""
    row_T: Tensor
    """int64 row, counted through all pages, that each token's latent goes to."""
    logit_R: Tensor | None
    """int64 tokens whose logits are wanted; None: all, as in a step that only decodes."""
    wide: Tensor | None = None
    """All of its int64; None: they are not of one piece."""
    narrow: Tensor | None = None
    """All of its int32; None: likewise."""

    @property
    def num_tokens(self) -> int:
        return self.row_T.shape[0]

    @property
    def num_decoded(self) -> int:
        """Tokens of the decode range, padded ones included."""
        return 0 if self.decode is None else self.decode.num_tokens

    def load(self, step: Step) -> None:
        """Takes over the numbers of a step of the same shapes into its own tensors, so that a graph
        captured with this one runs that one. Two copies, nothing is waited for.

        Raises:
            ValueError: a step prefills, or they differ in shape.
        """
        mine, other = self.shape, step.shape
        if self.prefill or step.prefill or mine != other:
            raise ValueError(f"steps of shapes {mine} and {other} are unlike, or one prefills")
        for to, source in ((self.wide, step.wide), (self.narrow, step.narrow)):
            assert to is not None
            assert source is not None
            to.copy_(source, non_blocking=True)

    @property
    def shape(self) -> tuple[int, int, int, bool]:
        """N, J, Q and whether drafts are verified; of two equal ones, steps that only decode have
        tensors of the same sizes."""
        decode = self.decode
        if decode is None:
            return 0, 0, 0, False
        n, j = decode.table_NJ.shape
        return n, j, decode.num_each, decode.keep_N is not None
