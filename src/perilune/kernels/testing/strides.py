"""Operands that are not contiguous: the same result, or a clear refusal."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from perilune.kernels.testing.compare import compare, holds, same_bits
from perilune.kernels.testing.memory import each_tensor
from perilune.kernels.testing.result import Case, Finding
from perilune.kernels.testing.subject import Draw, Subject

Layout = Callable[[Tensor], tuple[Tensor, Tensor]]
"""(buffer, view) of a copy: whatever of the buffer the view does not show is NaN."""


def padded_rows(x: Tensor) -> tuple[Tensor, Tensor]:
    """Every row twice as long as what is used of it (`buffer[..., :width]`)."""
    buffer = _hostile(x, (*x.shape[:-1], 2 * x.shape[-1]))
    return buffer, buffer[..., : x.shape[-1]]


def every_other_slice(x: Tensor) -> tuple[Tensor, Tensor]:
    """The leading stride twice as large: a pool's slots lie apart."""
    buffer = _hostile(x, (2 * x.shape[0], *x.shape[1:]))
    return buffer, buffer[::2]


def transposed(x: Tensor) -> tuple[Tensor, Tensor]:
    """The outer two axes in memory the other way round."""
    if x.dim() < 2:
        return padded_rows(x)
    buffer = _hostile(x, (x.shape[1], x.shape[0], *x.shape[2:]))
    return buffer, buffer.transpose(0, 1)


def last_axis_outside(x: Tensor) -> tuple[Tensor, Tensor]:
    """The last axis, which kernels like to take for stride 1, is the slowest."""
    buffer = _hostile(x, (x.shape[-1], *x.shape[:-1]))
    return buffer, buffer.movedim(0, -1)


LAYOUTS: tuple[Layout, ...] = (padded_rows, every_other_slice, transposed, last_axis_outside)


def strides(subject: Subject) -> Iterator[Case]:
    lengths = subject.shapes[-1]
    for layout in LAYOUTS:
        name = layout.__name__.replace("_", " ")
        for operand in _operands(subject, lengths) if subject.sizes.thorough else ():
            yield subject.case(f"{name} of {operand}", relaid, lengths, layout, (operand,), False)
        for grad in subject.modes:
            how = " with gradients" if grad else ""
            yield subject.case(f"{name} of all{how}", relaid, lengths, layout, None, grad)


def relaid(
    subject: Subject,
    draw: Draw,
    lengths: tuple[int, ...],
    layout: Layout,
    operands: tuple[str, ...] | None,
    grad: bool,
) -> Iterator[Finding]:
    """The named operands (None: all) in another layout, against the contiguous ones."""
    inputs = draw(*lengths)
    plain = subject.run(inputs, grad=grad)
    kept: list[tuple[str, Tensor, Tensor]] = []

    def relay(name: str, x: Tensor) -> Tensor:
        if operands is not None and name not in operands:
            return x
        buffer, view = layout(x.detach())
        view.copy_(x.detach())
        kept.append((name, buffer.clone(), view))
        return view.detach().requires_grad_(x.requires_grad)

    moved = each_tensor(subject.placed(inputs, grad=grad), relay)
    yield from compare(subject.run_on(moved, grad=grad), plain, subject.tolerance)
    for name, before, view in kept:
        yield holds(f"nothing between the rows of {name} changed", _gaps_hold(before, view))


def _gaps_hold(before: Tensor, view: Tensor) -> bool:
    """Whether the buffer of `view` is as before wherever the view does not show it."""
    now = before.new_empty(0).set_(view.untyped_storage(), 0, before.shape, before.stride())
    was = before.clone()
    was.as_strided(view.shape, view.stride(), view.storage_offset()).copy_(view)
    return same_bits(now, was)


def _operands(subject: Subject, lengths: tuple[int, ...]) -> list[str]:
    probe = subject.traits.make(torch.Generator(), subject.dtype, lengths, subject.width)
    return [name for name, value in probe.items() if isinstance(value, Tensor)]


def _hostile(x: Tensor, shape: tuple[int, ...]) -> Tensor:
    value = torch.nan if x.is_floating_point() else 0
    return torch.empty(shape, dtype=x.dtype, device=x.device).fill_(value)
