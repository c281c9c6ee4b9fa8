"""What the property checks need to know of an op, and how to draw its inputs at any size."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

import torch

from perilune.kernels.registry import Inputs

Maker = Callable[[torch.Generator, torch.dtype, tuple[int, ...], int], Inputs]
"""Inputs of sequences of these lengths and of that width. An op without a packing gets as many
independent tokens as the lengths add up to."""


class OneToken(NamedTuple):
    """What continues a sequence of the op token by token."""

    run: str
    """`module:attr` of plain torch."""
    in_place: tuple[str, ...]
    """Its inputs that hold states, in the order of the op's."""
    convert: Callable[[Inputs], Inputs]
    """From the op's inputs of one-token sequences."""


class Drafts(NamedTuple):
    """Several tokens a sequence, of which only the first few may be kept."""

    make: Callable[[torch.Generator, torch.dtype, int, int], Inputs]
    """(generator, dtype, sequences, tokens of each)."""
    keep: str
    """The input that says how many tokens of each sequence its state keeps; None: all."""


@dataclass(frozen=True, kw_only=True)
class Traits:
    make: Maker
    tokens: Mapping[str, int] = field(default_factory=dict)
    """Input -> its axis of tokens."""
    sequences: Mapping[str, int] = field(default_factory=dict)
    """Input -> its axis of sequences (without a packing: of tokens, too)."""
    token_outputs: Mapping[int, int] = field(default_factory=lambda: {0: 0})
    """Output -> its axis of tokens."""
    state_outputs: Mapping[str, int] = field(default_factory=dict)
    """Optional input with the state before the first token -> the output with that after the last.
    Both have sequences in front."""
    packing: str = ""
    """The input that says where sequences lie; without one a token sees no other token."""
    in_place: tuple[str, ...] = ()
    """Inputs with states that the op writes to."""
    counters: tuple[str, ...] = ()
    """Inputs that every token adds to; None where nothing is counted."""
    slots: str = ""
    """The input with each sequence's row of every in-place input; other rows stay as they are."""
    inert_slot: int | None = None
    """A number in `slots` that marks padding: such a row changes nothing."""
    widths: tuple[int, ...] = (16,)
    full_widths: tuple[int, ...] = (64, 128)
    """Widths on the gpu tier."""
    scaled: tuple[str, ...] = ()
    """Inputs that may be a hundred times smaller, or eight times larger, than the model's."""
    regimes: Mapping[str, Callable[[Inputs], Inputs]] = field(default_factory=dict)
    """Named extremes, made from plain inputs."""
    slowest: str = ""
    """The regime in which a state fades slowest: there rounding has time to add up."""
    one_token: OneToken | None = None
    drafts: Drafts | None = None
    serves: Mapping[str, Callable[[Inputs], bool]] = field(default_factory=dict)
    """Device type -> whether its backend serves these inputs itself. Where it says no, the backend
    hands over to the reference; without an entry it never does."""
    batch_invariant: Mapping[str, int] = field(default_factory=dict)
    """Backend -> up to how many tokens (sequences) a row has the bits that it has alone."""
    gradients_vary: Mapping[str, Callable[[Inputs], bool]] = field(default_factory=dict)
    """Backend -> whether gradients of these inputs may have other bits the next time, unless torch
    is asked for deterministic algorithms. Without an entry none do."""
    rounding_sees_ahead: frozenset[str] = frozenset()
    """Backends whose rounding, but not whose result, depends on later tokens of a chunk."""
    graphs: frozenset[str] = frozenset()
    """Backends that can be captured in a CUDA graph."""

    @property
    def written(self) -> tuple[str, ...]:
        """Inputs that may change, and no others."""
        return self.in_place + self.counters
