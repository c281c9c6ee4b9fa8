"""Slots of recurrent states: who uses which.

One number means the same slot in every KDA layer's pool (`model.pools.StatePool`): a state and the
convolution's window. A running sequence has one that every token overwrites; a published one is
never written again, only copied.
"""

from __future__ import annotations

from perilune.engine.counted_pool import CountedPool


class SlotPool(CountedPool):
    """`allocate`, `share`, `release`, `check`: see `CountedPool`. Padded rows have no slot."""

    kind = "slot"
