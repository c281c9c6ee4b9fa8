"""Pages of latents: who uses which.

One number means the same page in every MLA layer's pool (`model.pools.LatentPool`). A sequence
writes rows into pages of its own; pages that are full and published are shared by reference.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from perilune.engine.counted_pool import CountedPool


class PagePool(CountedPool):
    """`allocate`, `share`, `release`, `check`: see `CountedPool`.

    Page 0 is scratch, where padded rows are written: it is never handed out.
    """

    kind = "page"

    def __init__(
        self, size: int, *, on_free: Callable[[Sequence[int]], None] | None = None
    ) -> None:
        """`size` counts page 0, as the tensors do."""
        super().__init__(size, num_reserved=1, on_free=on_free)
