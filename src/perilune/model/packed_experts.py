"""Routed experts that stay MXFP4, in the order in which the kernels multiply them: for inference.

Legend: T tokens, L expert input width, E experts, R experts a token, O output rows; MKW tiles as in
`kernels/experts/tiles`.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from perilune.kernels.experts.tiles import Packed, is_wide, tiled
from perilune.kernels.registry import resolve
from perilune.kernels.router.reference import Routes
from perilune.model import mxfp4
from perilune.model.tensors import TensorSpec

experts_mxfp4 = resolve("experts_mxfp4")


class PackedExperts(nn.Module):
    """Stands where `moe.Experts` does, with a quarter of its bytes in bf16."""

    w13: Tensor
    w2: Tensor

    def __init__(self, w13_EMKW: Tensor, w2_EMKW: Tensor, wide: bool) -> None:
        super().__init__()
        self.register_buffer("w13", w13_EMKW)
        self.register_buffer("w2", w2_EMKW)
        self.wide = wide

    def forward(
        self, z_TL: Tensor, routes: Routes, caps: tuple[float | None, float | None]
    ) -> Tensor:
        chosen = routes.expert_TR, routes.weight_TR
        return experts_mxfp4(z_TL, *chosen, self.w13, self.w2, self.wide, *caps)


class Packer:
    """The experts of all layers, taken one matrix after the other as files have them."""

    def __init__(self, own: range, device: torch.device) -> None:
        """`own` are the experts that it will be given."""
        self._own, self._device = own, device
        self._tiles: dict[str, Tensor] = {}
        self._wide: set[str] = set()
        self._gate: tuple[TensorSpec, Packed] | None = None

    def add(self, spec: TensorSpec, stored: mxfp4.Packed) -> None:
        """`stored` [O, ...] is the matrix of `spec`; an up projection follows its gate."""
        packed = Packed(*(x.to(self._device)[None] for x in stored))
        gated = spec.target.endswith("w13")
        if gated and spec.rows[0] == 0:
            self._gate = spec, packed
            return
        if gated:
            assert self._gate is not None, spec
            of, gate = self._gate
            assert (of.target, of.expert) == (spec.target, spec.expert), (of, spec)
            packed = Packed(*(torch.cat(pair, 1) for pair in zip(gate, packed, strict=True)))
        tiles_MKW = tiled(packed, gated=gated)[0]
        if spec.target not in self._tiles:
            shape = len(self._own), *tiles_MKW.shape
            self._tiles[spec.target] = tiles_MKW.new_empty(shape)
        assert spec.expert is not None
        self._tiles[spec.target][self._own.index(spec.expert)] = tiles_MKW
        if is_wide(packed):
            self._wide.add(spec.target)

    def modules(self) -> dict[str, PackedExperts]:
        """By the name of what they stand for in the model."""
        names = {target.rpartition(".")[0] for target in self._tiles}
        return {name: self._module(f"{name}.w13", f"{name}.w2") for name in sorted(names)}

    def _module(self, w13: str, w2: str) -> PackedExperts:
        wide = not self._wide.isdisjoint((w13, w2))
        return PackedExperts(self._tiles[w13], self._tiles[w2], wide)
