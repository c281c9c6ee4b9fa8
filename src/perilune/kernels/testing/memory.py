"""Memory between bands: what is written beside it is seen, and hits nothing else."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from perilune.kernels.registry import Inputs
from perilune.kernels.testing.compare import same_bits

BAND = 4096
"""Elements on either side: farther than a tile reaches, and a multiple of every alignment."""
_CANARY = 77
_EMPTY = {
    torch.ops.aten.empty.memory_format,
    torch.ops.aten.empty_like.default,
    torch.ops.aten.empty_strided.default,
    torch.ops.aten.new_empty.default,
    torch.ops.aten.new_empty_strided.default,
}
_ZERO = {
    torch.ops.aten.zeros.default,
    torch.ops.aten.zeros_like.default,
    torch.ops.aten.new_zeros.default,
}


class NewMemory(TorchDispatchMode):
    """Whatever is allocated stands between bands that must not change. With `poisoned`, it is full
    of NaN (of a large number, where integers live) unless zeros are asked for."""

    def __init__(self, *, poisoned: bool) -> None:
        super().__init__()
        self._poisoned = poisoned
        self._banded: list[tuple[Tensor, Tensor]] = []

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        out = func(*args, **(kwargs or {}))
        if func in _EMPTY:
            return self._between_bands(out, _poison(out.dtype) if self._poisoned else 0)
        if func in _ZERO:
            return self._between_bands(out, 0)
        return out

    def _between_bands(self, out: Tensor, value: float) -> Tensor:
        buffer, inner = banded(out, _CANARY)
        inner.fill_(value)
        self._banded.append((buffer, inner))
        return inner

    def overrun(self) -> bool:
        """Whether something was written outside of the memory that was asked for."""
        return any(not bands_hold(*pair, _CANARY) for pair in self._banded)


def _poison(dtype: torch.dtype) -> float:
    if dtype.is_floating_point or dtype.is_complex:
        return torch.nan
    return 1 if dtype == torch.bool else torch.iinfo(dtype).max // 2


def banded(x: Tensor, value: float) -> tuple[Tensor, Tensor]:
    """(buffer, view): a buffer filled with `value`, and room for `x` in the middle of it."""
    extent = sum((size - 1) * stride for size, stride in zip(x.shape, x.stride(), strict=True)) + 1
    extent = extent if x.numel() else 0
    buffer = torch.empty(extent + 2 * BAND, dtype=x.dtype, device=x.device).fill_(value)
    return buffer, buffer.as_strided(x.shape, x.stride(), BAND)


def bands_hold(buffer: Tensor, inner: Tensor, value: float) -> bool:
    """Whether both bands of `banded` are as they were made."""
    extent = buffer.numel() - 2 * BAND
    want = torch.empty(BAND, dtype=buffer.dtype, device=buffer.device).fill_(value)
    return all(same_bits(band, want) for band in (buffer[:BAND], buffer[BAND + extent :]))


def each_tensor(inputs: Inputs, change: Callable[[str, Tensor], Tensor]) -> Inputs:
    """`change(name, x)` in place of every tensor."""
    return {
        name: change(name, value) if isinstance(value, Tensor) else value
        for name, value in inputs.items()
    }
