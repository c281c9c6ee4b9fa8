"""Which implementation ran: a backend hands over to the reference by a declared rule only."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Iterator
from types import CodeType, FrameType
from typing import Any

import torch

from perilune.kernels.registry import load_attr
from perilune.kernels.testing.compare import holds
from perilune.kernels.testing.implementation import REFERENCE, is_triton
from perilune.kernels.testing.result import Case, Finding
from perilune.kernels.testing.subject import Draw, Subject

_TRITON_RUNTIME = "/triton/runtime/"


class Watch:
    """Sees every Python function that is called inside, however it was imported."""

    def __init__(self, reference: CodeType) -> None:
        self._reference = reference
        self.reference_ran = False
        self.triton_ran = False
        self._before: Any = None

    def __enter__(self) -> Watch:
        self._before = sys.getprofile()
        sys.setprofile(self._see)
        return self

    def __exit__(self, *_: object) -> None:
        sys.setprofile(self._before)

    def _see(self, frame: FrameType, event: str, _: object) -> None:
        if event == "call":
            self.reference_ran |= frame.f_code is self._reference
            self.triton_ran |= _TRITON_RUNTIME in frame.f_code.co_filename


def served(subject: Subject) -> Iterator[Case]:
    if subject.backend == REFERENCE:
        return
    for lengths in subject.shapes:
        for grad in subject.modes:
            how = "with gradients" if grad else "in inference"
            case = f"{how}, lengths {'+'.join(map(str, lengths))}"
            yield subject.case(case, _as_declared, lengths, grad)


def _as_declared(
    subject: Subject, draw: Draw, lengths: tuple[int, ...], grad: bool
) -> Iterator[Finding]:
    inputs = draw(*lengths)
    rule = subject.traits.serves.get(subject.implementation.backend, lambda inputs: True)
    with torch.set_grad_enabled(grad):
        own = rule(inputs)
    watch = Watch(inspect.unwrap(load_attr(subject.spec.reference)).__code__)
    subject.run(inputs, grad=grad, around=watch)
    yield holds("the reference ran" if own else "handed over", watch.reference_ran != own)
    if own and is_triton(subject.implementation.path):
        yield holds("a Triton kernel ran", watch.triton_ran)
