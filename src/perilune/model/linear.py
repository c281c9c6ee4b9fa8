"""Linear maps without bias that share an input, run as one product.

Legend: T tokens, D input width.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.nn.functional import linear

from perilune.kernels.common.half_linear import MAX_TOKENS, HalfLinear, half_linear


class Linear(nn.Module):
    """y = x W^T in the dtype of x. There is no bias anywhere in the text model."""

    def __init__(self, in_features: int, out_features: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(out_features, in_features))
        self.as_half: HalfLinear | None = None

    def freeze(self) -> None:
        self.as_half = half_linear(self.weight)

    def forward(self, x_TD: Tensor) -> Tensor:
        if self.as_half is not None and x_TD.shape[0] <= MAX_TOKENS:
            return self.as_half(x_TD)
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
        self.as_half: HalfLinear | None = None

    def __call__(self, x_TD: Tensor) -> Tensor:
        if self.as_half is not None and x_TD.shape[0] <= MAX_TOKENS:
            return self.as_half(x_TD)
        weight = self.frozen
        if weight is None:
            weight = torch.cat([part.weight for part in self.parts]).to(x_TD.dtype)
        return linear(x_TD, weight)

    def split(self, x_TD: Tensor) -> tuple[Tensor, ...]:
        """The product, cut into one output a part (views)."""
        return self(x_TD).split(self.sizes, dim=-1)

    def freeze(self) -> None:
        self.frozen = torch.cat([part.weight.data for part in self.parts])
        self.as_half = half_linear(self.frozen)
        for part, rows in zip(self.parts, self.frozen.split(self.sizes), strict=True):
            part.weight = nn.Parameter(rows, requires_grad=False)


class Embedding(nn.Module):
    """Rows of a table. (`nn.Embedding` imports torch's compiler when built without storage: seconds
    of start-up.)"""

    def __init__(self, num_rows: int, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(num_rows, width))

    def forward(self, ids_T: Tensor) -> Tensor:
        return torch.nn.functional.embedding(ids_T, self.weight)
