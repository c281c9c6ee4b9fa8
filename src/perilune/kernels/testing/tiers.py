"""How large the checks of a tier are."""

from __future__ import annotations

from dataclasses import dataclass

from perilune.kernels.common.few_tokens import MAX_TOKENS
from perilune.kernels.testing.implementation import Implementation

TIERS = ("cpu", "gpu")

_AROUND_TILES = tuple(tile + i for tile in (16, 32, 64, 128) for i in (-1, 0, 1))

_ROWS = (1, 2, *(MAX_TOKENS + i for i in (-1, 0, 1)), 17, 65, 129, 500, 1500)


@dataclass(frozen=True, kw_only=True)
class Sizes:
    lengths: tuple[int, ...]
    """Of a single sequence: 1, 2, about every tile and chunk in use, and plain ones."""
    far: int
    """A length far beyond those."""
    rows: tuple[int, ...]
    """Numbers of tokens where none sees another one: about where loops for few tokens end."""
    oracle_tokens: int
    """Beyond, the reference in float64 stands for the oracle, which is a loop."""
    oracle_rows: int = 33
    """The same for ops in which no token sees another one."""
    grad_tokens: int
    """Up to here gradients are compared, too."""
    mixed: tuple[int, ...]
    """Lengths of a pack."""
    rows_drawn: tuple[int, ...] = (MAX_TOKENS + 9, 5)
    """Where no token sees another one: more, and fewer, tokens than loops for few tokens serve."""
    drift_steps: int
    batches: tuple[int, ...]
    """In which a row has to be what it is alone."""
    thorough: bool
    """Else each family takes a selection: an interpreted kernel takes a second."""
    full_width: bool = False


SMALL = Sizes(
    lengths=(1, 2, *_AROUND_TILES, 500, 1000),
    far=2500,
    rows=_ROWS,
    oracle_tokens=1000,
    grad_tokens=129,
    mixed=(33, 1, 17, 2),
    drift_steps=128,
    batches=(2, MAX_TOKENS, 64, 256),
    thorough=True,
)
INTERPRETED = Sizes(
    lengths=(1, 16, 33),
    far=49,
    rows=(1, 2, 5),
    oracle_tokens=129,
    grad_tokens=16,
    mixed=(17, 2),
    rows_drawn=(4,),
    drift_steps=8,
    batches=(3,),
    thorough=False,
)
FULL = Sizes(
    lengths=(1, 2, *_AROUND_TILES, 500, 1000, 1536),
    far=8200,
    rows=(*_ROWS, 8200),
    oracle_tokens=130,
    grad_tokens=1000,
    mixed=(129, 1, 300, 2, 64),
    drift_steps=512,
    batches=(2, 7, 8, 64, 256),
    thorough=True,
    full_width=True,
)


def sizes_of(implementation: Implementation) -> Sizes:
    """What a run of `implementation` can afford."""
    if implementation.interpreted:
        return INTERPRETED
    return SMALL if implementation.device == "cpu" else FULL
