"""Input scales and an op's named extremes, each with several seeds; gradients included."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from perilune.kernels.registry import Inputs
from perilune.kernels.testing.result import Case, Finding
from perilune.kernels.testing.subject import Draw, Subject, against_truth

SCALES = (1.0, 0.01, 8.0)


def regimes(subject: Subject) -> Iterator[Case]:
    """Scales and regimes against the truth, for a pack and, without one, for few tokens too."""
    changes: dict[str, Callable[[Inputs], Inputs]] = {
        f"scale {factor:g}": lambda inputs, factor=factor: _scaled(subject, inputs, factor)
        for factor in SCALES
    }
    changes |= {name.replace("_", " "): change for name, change in subject.traits.regimes.items()}
    for index, (name, change) in enumerate(changes.items()):
        for lengths in subject.shapes:
            for seed in _seeds(subject, index):
                case = f"{name}, lengths {'+'.join(map(str, lengths))}"
                grad = subject.sizes.thorough or index % 3 == 0
                yield subject.case(case, _regime, lengths, change, grad, seed=seed)


def _seeds(subject: Subject, index: int) -> tuple[int, ...]:
    """Every seed for the first change; after it the drawn one, and a fixed one in turn."""
    *fixed, drawn = subject.seeds
    if not subject.sizes.thorough:
        return (subject.seeds[index % len(subject.seeds)],)
    return subject.seeds if index == 0 else (fixed[index % len(fixed)], drawn)


def _regime(
    subject: Subject,
    draw: Draw,
    lengths: tuple[int, ...],
    change: Callable[[Inputs], Inputs],
    grad: bool,
) -> Iterator[Finding]:
    return against_truth(subject, draw, change(draw(*lengths)), grad=grad)


def _scaled(subject: Subject, inputs: Inputs, factor: float) -> Inputs:
    def scale(x: Tensor) -> Tensor:
        with torch.no_grad():
            return (x * factor).requires_grad_(x.requires_grad)

    return inputs | {name: scale(inputs[name]) for name in subject.traits.scaled}
