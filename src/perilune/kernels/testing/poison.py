"""Hostile memory: what an op must not read is NaN or huge, what it must not write is watched."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from perilune.kernels.registry import Inputs
from perilune.kernels.testing.compare import holds, identical, same_bits
from perilune.kernels.testing.result import Case, Finding
from perilune.kernels.testing.run import placed
from perilune.kernels.testing.slicing import num_sequences, results_of
from perilune.kernels.testing.subject import Draw, Subject

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


class PoisonedMemory(TorchDispatchMode):
    """New memory is full of NaN (of a large number, where integers live) and stands between bands
    that must not change; zeroed memory is zero, between such bands."""

    def __init__(self) -> None:
        super().__init__()
        self._banded: list[tuple[Tensor, Tensor]] = []

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        out = func(*args, **(kwargs or {}))
        if func in _EMPTY:
            return self._between_bands(out, _poison(out.dtype))
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


def poison(subject: Subject) -> Iterator[Case]:
    for lengths in subject.shapes:
        tail = f", lengths {'+'.join(map(str, lengths))}"
        for grad in (False, True):
            how = " with gradients" if grad else ""
            yield subject.case(f"new memory is NaN{how}{tail}", new_memory, lengths, grad)
            for value in (torch.nan, 1e30):
                case = f"{value:g} around every input{how}{tail}"
                yield subject.case(case, surrounded, lengths, value, grad)
        if subject.traits.tokens:
            yield subject.case(f"NaN in one sequence{tail}", _neighbour, lengths)


def new_memory(
    subject: Subject, draw: Draw, lengths: tuple[int, ...], grad: bool
) -> Iterator[Finding]:
    """The same bits when outputs and work buffers start as NaN, and nothing beside them changes."""
    inputs = draw(*lengths)
    plain = subject.run(inputs, grad=grad)
    memory = PoisonedMemory()
    poisoned = subject.run(inputs, grad=grad, around=memory)
    yield from identical(poisoned, plain)
    yield holds("nothing beside new memory changed", not memory.overrun())


def surrounded(
    subject: Subject, draw: Draw, lengths: tuple[int, ...], value: float, grad: bool
) -> Iterator[Finding]:
    """The same bits whatever lies before and behind each input, and that stays as it was."""
    inputs = draw(*lengths)
    plain = subject.run(inputs, grad=grad)
    kept: list[tuple[str, Tensor, Tensor]] = []

    def surround(name: str, x: Tensor) -> Tensor:
        if not x.is_floating_point():
            return x
        buffer, inner = banded(x.detach(), value)
        inner.copy_(x.detach())
        kept.append((name, buffer, inner))
        return inner.detach().requires_grad_(x.requires_grad)

    around = each_tensor(placed(inputs, subject.device, grad=grad), surround)
    yield from identical(subject.run_on(around, grad=grad), plain)
    for name, buffer, inner in kept:
        yield holds(f"bands of {name}", bands_hold(buffer, inner, value))


def each_tensor(inputs: Inputs, change: Callable[[str, Tensor], Tensor]) -> Inputs:
    """`change(name, x)` in place of every tensor."""
    return {
        name: change(name, value) if isinstance(value, Tensor) else value
        for name, value in inputs.items()
    }


def _neighbour(subject: Subject, draw: Draw, lengths: tuple[int, ...]) -> Iterator[Finding]:
    """NaN in the tokens and the state of one sequence reaches no other one."""
    traits = subject.traits
    inputs = draw(*lengths)
    total = num_sequences(traits, inputs)
    sick = draw.integer(0, total - 1)
    well = [n for n in range(total) if n != sick]
    broken = _with_nan(subject, inputs, sick)
    got = results_of(traits, inputs, subject.run(broken), well)
    want = results_of(traits, inputs, subject.run(inputs), well)
    for what, error, bound in identical(got, want):
        yield Finding(f"{what} beside sequence {sick}", error, bound)


def _with_nan(subject: Subject, inputs: Inputs, sick: int) -> Inputs:
    traits = subject.traits
    start, end = sick, sick + 1
    if traits.packing:
        start, end = inputs[traits.packing].cu_seqlens[sick : sick + 2]
    places = {name: (axis, start, end) for name, axis in traits.tokens.items()}
    places |= {name: (axis, sick, sick + 1) for name, axis in traits.sequences.items()}
    if traits.slots:
        slot = int(inputs[traits.slots][sick])
        places |= dict.fromkeys(traits.in_place, (0, slot, slot + 1))

    def broken(name: str, x: Tensor) -> Tensor:
        if name not in places or not x.is_floating_point():
            return x
        axis, first, last = places[name]
        x = x.detach().clone()
        x.narrow(axis, first, last - first).fill_(torch.nan)
        return x

    return each_tensor(inputs, broken)
