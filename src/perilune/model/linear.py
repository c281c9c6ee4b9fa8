"""Linear maps without bias that share an input, run as one product.

Legend: T tokens, D input width.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.nn.functional import linear


class Linear(nn.Module):
    """y = x W^T in the dtype of x. There is no bias anywhere in the text model."""

    def __init__(self, in_features: int, out_features: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(out_features, in_features))

    def forward(self, x_TD: Tensor) -> Tensor:
        return linear(x_TD, self.weight.to(x_TD.dtype))


class Fused:
    """Several `Linear`s on the same input as one matrix product.

    Training concatenates the weights on every call. `freeze` does it once and turns the separate
    weights into views of the result, so that checkpoints and names stay as they are.
    """

    def __init__(self, parts: Sequence[Linear]) -> None:
        self.parts = tuple(parts)
        self.sizes = [part.weight.shape[0] for part in parts]
        self.frozen: Tensor | None = None

    def __call__(self, x_TD: Tensor) -> Tensor:
        weight = self.frozen
        if weight is None:
            weight = torch.cat([part.weight for part in self.parts]).to(x_TD.dtype)
        return linear(x_TD, weight)

    def split(self, x_TD: Tensor) -> tuple[Tensor, ...]:
        """The product, cut into one output a part (views)."""
        return self(x_TD).split(self.sizes, dim=-1)

    def freeze(self) -> None:
        self.frozen = torch.cat([part.weight.data for part in self.parts])
        for part, rows in zip(self.parts, self.frozen.split(self.sizes), strict=True):
            part.weight = nn.Parameter(rows, requires_grad=False)
