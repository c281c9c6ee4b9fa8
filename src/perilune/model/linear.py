"""Linear maps without bias that share an input, run as one product.

Legend: T tokens, D input width.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from perilune.kernels.common.few_tokens import MAX_TOKENS
from perilune.kernels.registry import resolve

linear = resolve("linear")


class Held:
    """A frozen weight; on a CPU also as bf16 where that loses nothing: half the bytes to read."""

    def __init__(self, weight: Tensor) -> None:
        self.weight = self.narrow = weight
        if weight.device.type == "cpu" and weight.dtype == torch.float32:
            narrow = weight.bfloat16()
            if torch.equal(narrow.float(), weight):
                self.narrow = narrow

    def for_tokens(self, num_tokens: int) -> Tensor:
        return self.narrow if num_tokens <= MAX_TOKENS else self.weight


class Linear(nn.Module):
    """y = x W^T in the dtype of x. There is no bias anywhere in the text model."""

    def __init__(self, in_features: int, out_features: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(out_features, in_features))
        self.held: Held | None = None

    def freeze(self) -> None:
        self.held = Held(self.weight.data)

    def forward(self, x_TD: Tensor) -> Tensor:
        held = self.held
        return linear(x_TD, self.weight if held is None else held.for_tokens(x_TD.shape[0]))


class Fused:
    """Several `Linear`s on the same input as one matrix product.

    Training concatenates the weights on every call. `freeze` does it once and turns the separate
    weights into views of the result, so that checkpoints and names stay as they are.
    """

    def __init__(self, parts: Sequence[Linear]) -> None:
        self.parts = tuple(parts)
        self.sizes = [part.weight.shape[0] for part in parts]
        self.held: Held | None = None

    def __call__(self, x_TD: Tensor) -> Tensor:
        if self.held is not None:
            return linear(x_TD, self.held.for_tokens(x_TD.shape[0]))
        return linear(x_TD, torch.cat([part.weight for part in self.parts]))

    def split(self, x_TD: Tensor) -> tuple[Tensor, ...]:
        """The product, cut into one output a part (views)."""
        return self(x_TD).split(self.sizes, dim=-1)

    def freeze(self) -> None:
        fused = torch.cat([part.weight.data for part in self.parts])
        self.held = Held(fused)
        for part, rows in zip(self.parts, fused.split(self.sizes), strict=True):
            part.weight = nn.Parameter(rows, requires_grad=False)


class Embedding(nn.Module):
    """Rows of a table. (`nn.Embedding` imports torch's compiler when built without storage: seconds
    of start-up.)"""

    def __init__(self, num_rows: int, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(num_rows, width))

    def forward(self, ids_T: Tensor) -> Tensor:
        return torch.nn.functional.embedding(ids_T, self.weight)
