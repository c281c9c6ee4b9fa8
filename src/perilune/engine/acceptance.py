"""Which of a chunk's sampled tokens count: those before the first that was drafted otherwise."""

from __future__ import annotations

from collections.abc import Sequence

from perilune.engine.batch import Chunk
from perilune.engine.sampler import Sampled


def accepted(chunk: Chunk, sampled: Sequence[Sampled]) -> list[Sampled]:
    """`sampled`: of the chunk's rows, each on the assumption that the draft before it is right.

    The row behind the last right guess counts, too: the model itself has given it. None counts
    behind a token that ends the sequence, or a fault.
    """
    sequence = chunk.sequence
    count = len(sequence.generated_ids)
    taken: list[Sampled] = []
    for row, draft in zip(sampled, [*chunk.drafted, None], strict=True):
        taken.append(row)
        if row.token_id is None or row.token_id != draft:
            break
        if sequence.end_at(row.token_id, count + len(taken)) is not None:
            break
    return taken
