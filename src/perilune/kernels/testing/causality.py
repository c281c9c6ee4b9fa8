"""A token changes nothing before it, and something at it."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from perilune.kernels.registry import Inputs
from perilune.kernels.testing.compare import compare, holds, identical, same_bits
from perilune.kernels.testing.result import Case, Finding
from perilune.kernels.testing.subject import Draw, Subject


def causality(subject: Subject) -> Iterator[Case]:
    if not subject.traits.packing:
        return
    length, places = (66, (1, 15, 33, 65)) if subject.sizes.thorough else (18, (16,))
    for at in places:
        yield subject.case(f"token {at} of {length} perturbed", _perturbed, length, at)


def _perturbed(subject: Subject, draw: Draw, length: int, at: int) -> Iterator[Finding]:
    traits = subject.traits
    inputs = draw(length)
    plain, changed = subject.run(inputs), subject.run(_with_other_token(subject, draw, inputs, at))
    for index, axis in traits.token_outputs.items():
        what = f"output {index}"
        before = {what: plain[what].narrow(axis, 0, at)}
        got = {what: changed[what].narrow(axis, 0, at)}
        if subject.backend in traits.rounding_sees_ahead:
            yield from compare(got, before, subject.tolerance)
        else:
            yield from identical(got, before)
        same = same_bits(plain[what].select(axis, at), changed[what].select(axis, at))
        yield holds(f"{what} sees its own token", not same)


def _with_other_token(subject: Subject, draw: Draw, inputs: Inputs, at: int) -> Inputs:
    def perturbed(x: Tensor, axis: int) -> Tensor:
        x = x.detach().clone()
        token = x.select(axis, at)
        token.add_(2 + 3 * torch.rand(token.shape, generator=draw.generator).to(token))
        return x

    changed = {name: perturbed(inputs[name], axis) for name, axis in subject.traits.tokens.items()}
    return inputs | changed
