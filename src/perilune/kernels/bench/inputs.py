"""Copies of an op's inputs, more than any cache holds, and new values in the same memory."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from perilune.kernels.bench.cases import Case, num_bytes
from perilune.kernels.common.packing import Packing
from perilune.kernels.registry import Inputs

CACHES = Path("/sys/devices/system/cpu/cpu0/cache")
DEFAULT_CACHE_BYTES = 32 << 20
"""Where the size of the last-level cache cannot be read."""
TIMES_CACHE = {"cuda": 4, "cpu": 2}
"""Twice would do if a cache dropped the oldest line, which no L2 of a GPU does exactly."""
MIN_COPIES, MAX_COPIES = 3, 512


def cache_bytes(device: torch.device) -> int:
    """Size of the last cache before memory."""
    if device.type == "cuda":
        return torch.cuda.get_device_properties(device).L2_cache_size
    units = {"K": 1 << 10, "M": 1 << 20}
    sizes = [path.read_text().strip() for path in CACHES.glob("index*/size")]
    return max((int(s[:-1]) * units[s[-1]] for s in sizes), default=DEFAULT_CACHE_BYTES)


def tensors(inputs: Inputs) -> dict[str, Tensor]:
    return {name: value for name, value in inputs.items() if isinstance(value, Tensor)}


class Copies:
    """The inputs of a case, again and again with other values."""

    def __init__(self, case: Case, device: torch.device, seed: int = 0) -> None:
        self._case = case
        self._generator = torch.Generator(device).manual_seed(seed)
        self.shared: Inputs = {}
        """The same tensors in every copy."""
        if case.shared is not None:
            self.shared = self._prepared(case.shared(self._generator, case.dtype))
        self.copies: list[Inputs] = []
        self.extend_to(1)

    @property
    def bytes_each(self) -> int:
        """Of what one copy does not share with the others."""
        own = tensors(self.copies[0]).keys() - self.shared.keys()
        return num_bytes(*(self.copies[0][name] for name in own))

    def extend_to(self, count: int) -> None:
        while len(self.copies) < min(count, MAX_COPIES):
            own = self._prepared(self._case.make(self._generator, self._case.dtype))
            self.copies.append(own | self.shared)

    def _prepared(self, inputs: Inputs) -> Inputs:
        if self._case.backward:
            for value in tensors(inputs).values():
                value.requires_grad_(value.is_floating_point())
        return inputs

    def rotate_beyond(self, size: int, bytes_each: int | None = None) -> None:
        """So many that together they take `size` bytes, and never fewer than three.

        `bytes_each`: what a call reads that the others do not, where that is not its own copy.
        """
        each = self.bytes_each if bytes_each is None else bytes_each
        self.extend_to(max(MIN_COPIES, -(-size // max(1, each))))

    def refresh(self) -> None:
        """Other values in the same memory, with the same pointers and version counters.

        Floats move on by one element and everything else by one row, so that indices stay valid
        and the distribution stays what it was. In one thread: others would go on spinning for a
        while, beside what is timed next.
        """
        threads = torch.get_num_threads()
        torch.set_num_threads(1)
        every = {id(x): x for inputs in self.copies for x in tensors(inputs).values()}
        for value in every.values():
            x = value.data
            x.copy_(torch.roll(x, 1) if x.is_floating_point() else _next_row(x))
        torch.set_num_threads(threads)


def _next_row(x: Tensor) -> Tensor:
    return torch.roll(x, 1, dims=0) if x.ndim else x


def clone(inputs: Inputs) -> Inputs:
    """Elsewhere in memory; what asks for a gradient does so there too."""

    def copied(value: Any) -> Any:
        if isinstance(value, Tensor):
            return value.detach().clone().requires_grad_(value.requires_grad)
        if isinstance(value, Packing) and value.segment_BL is not None:
            return replace(value, segment_BL=value.segment_BL.clone())
        return value

    return {name: copied(value) for name, value in inputs.items()}


def thunks(
    op: Callable[..., Any], copies: list[Inputs], backward: bool
) -> Iterator[Callable[[], Any]]:
    """A call a copy: the op's outputs, and with `backward` the gradients after them."""
    for inputs in copies:
        yield _forward_and_backward(op, inputs) if backward else _forward(op, inputs)


def _forward(op: Callable[..., Any], inputs: Inputs) -> Callable[[], Any]:
    return lambda: op(**inputs)


def _forward_and_backward(op: Callable[..., Any], inputs: Inputs) -> Callable[[], Any]:
    leaves = [x for x in tensors(inputs).values() if x.requires_grad]
    grad_outputs: list[Tensor] = []

    def call() -> list[Any]:
        outputs = differentiable(op(**inputs))
        if not grad_outputs:
            grad_outputs.extend(projection(x) for x in outputs)
        grads = torch.autograd.grad(outputs, leaves, grad_outputs, allow_unused=True)
        return [*outputs, *grads]

    return call


def differentiable(out: Any) -> list[Tensor]:
    """The outputs through which gradients flow."""
    outputs = [out] if isinstance(out, Tensor) else list(out)
    return [x for x in outputs if isinstance(x, Tensor) and x.requires_grad]


def projection(x: Tensor) -> Tensor:
    """The same gradient of an output, wherever its part of a bigger one lies: a plane wave."""
    wave = torch.ones((), dtype=torch.float32, device=x.device)
    for axis, size in enumerate(x.shape):
        along = torch.arange(size, device=x.device, dtype=torch.float32) * (0.7 + 0.31 * axis)
        wave = wave * along.cos().add(0.5).view(-1, *[1] * (x.ndim - axis - 1))
    return wave.to(x.dtype)
