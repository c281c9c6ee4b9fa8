"""Several tokens a sequence, some of them kept: rolled back, a state is that of the kept ones."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from perilune.kernels.registry import Inputs
from perilune.kernels.testing.compare import compare, holds, same_bits
from perilune.kernels.testing.result import Case, Finding
from perilune.kernels.testing.subject import Draw, Subject

LENGTH = 4


def drafts(subject: Subject) -> Iterator[Case]:
    """Every count from none to all, each beside other counts in one batch."""
    if subject.traits.drafts is None:
        return
    for shift in range(LENGTH + 1) if subject.sizes.thorough else (0, 2):
        counts = [(shift + n) % (LENGTH + 1) for n in range(3)]
        yield subject.case(f"{counts} of {LENGTH} tokens kept", _kept, counts)


def _kept(subject: Subject, draw: Draw, counts: list[int]) -> Iterator[Finding]:
    traits = subject.traits
    assert traits.drafts is not None
    inputs = traits.drafts.make(draw.generator, subject.dtype, len(counts), LENGTH)
    results = subject.run(inputs | {traits.drafts.keep: torch.tensor(counts)})
    for n, count in enumerate(counts):
        slot = int(inputs[traits.slots][n])
        now = {f"after {name}": results[f"after {name}"][slot] for name in traits.in_place}
        if count == 0:
            for name in traits.in_place:
                kept = same_bits(now[f"after {name}"], inputs[name][slot].detach())
                yield holds(f"{name} of sequence {n} as before", kept)
            continue
        fresh = subject.run(_alone(subject, inputs, n, count))
        want = {f"after {name}": fresh[f"after {name}"][slot] for name in traits.in_place}
        first = n * LENGTH
        now["output 0"] = results["output 0"][first : first + count]
        want["output 0"] = fresh["output 0"]
        for what, error, bound in compare(now, want, subject.tolerance):
            yield Finding(f"{what} of sequence {n}", error, bound)


def _alone(subject: Subject, inputs: Inputs, n: int, count: int) -> Inputs:
    """The first tokens of one sequence, all of which are kept."""
    traits = subject.traits
    first = n * LENGTH
    tokens = {name: inputs[name].narrow(axis, first, count) for name, axis in traits.tokens.items()}
    own = {
        name: inputs[name].narrow(axis, n, 1)
        for name, axis in traits.sequences.items()
        if inputs[name] is not None
    }
    return inputs | tokens | own
