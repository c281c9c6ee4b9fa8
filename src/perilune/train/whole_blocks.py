"""Blocks of matrices that are shared out among ranks, made whole as far as they have to be.

Legend: N matrices of one shape, M rows, K columns.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.placement_types import Placement


def own_part(x: Tensor) -> Tensor:
    """What this rank holds of x: a view of it, or x itself where it is not shared out."""
    return x.to_local() if isinstance(x, DTensor) else x


def cut(x: Tensor, blocks: Sequence[int]) -> list[Tensor]:
    """Views [N, M, K] of the blocks of x, [..., M, K]: matrix by matrix, or, of a single matrix,
    rows in runs of `blocks`, over and over."""
    if x.ndim > 2 or not blocks:
        return [x.view(-1, *x.shape[-2:])]
    return list(x.view(-1, sum(blocks), x.shape[-1]).split(list(blocks), dim=1))


class WholeBlocks:
    """How a parameter has to lie so that each of its blocks is on one rank.

    Stacked matrices, and heads, of which every rank holds some, stay where they are. All others are
    gathered by every rank.
    """

    def __init__(self, parameter: Tensor, blocks: Sequence[int]) -> None:
        self._parameter = parameter
        self._lying = _placements(parameter, blocks) if isinstance(parameter, DTensor) else []

    def gathered(self, own: Tensor) -> Tensor:
        """From what this rank holds of a tensor like the parameter: whole blocks."""
        p = self._parameter
        if not isinstance(p, DTensor):
            return own
        return self._as(own, p.placements).redistribute(placements=self._lying).to_local()

    def given_back(self, whole: Tensor) -> Tensor:
        """What this rank holds of a tensor of which `gathered` gave whole blocks."""
        p = self._parameter
        if not isinstance(p, DTensor):
            return whole
        return self._as(whole, self._lying).redistribute(placements=p.placements).to_local()

    def _as(self, local: Tensor, placements: Sequence[Placement]) -> DTensor:
        p = self._parameter
        assert isinstance(p, DTensor)
        size = {"shape": p.shape, "stride": p.stride()}
        return DTensor.from_local(local, p.device_mesh, placements, run_check=False, **size)


def _placements(p: DTensor, blocks: Sequence[int]) -> list[Placement]:
    """Those of p, but for ranks that would hold parts of blocks."""
    along_first = [placement.is_shard(0) for placement in p.placements]
    if p.ndim > 2:
        is_whole = sum(along_first) == 1
    else:
        ranks = p.device_mesh.size(along_first.index(True)) if any(along_first) else 1
        is_whole = bool(blocks) and sum(along_first) == 1
        is_whole = is_whole and p.shape[0] % (ranks * sum(blocks)) == 0
    keep = Shard(0)
    return [keep if is_whole and is_first else Replicate() for is_first in along_first]
