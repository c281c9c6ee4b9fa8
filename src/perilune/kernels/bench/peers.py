"""Other people's kernels, measured beside ours where they are installed."""

from __future__ import annotations

from collections.abc import Sequence
from importlib.metadata import PackageNotFoundError, version
from typing import NamedTuple

import torch

from perilune.core.errors import UnsupportedError
from perilune.kernels.bench.cases import Bound, Case, Peer
from perilune.kernels.bench.contender import Contender, GraphContender
from perilune.kernels.bench.inputs import Copies, clone
from perilune.kernels.bench.verify import GRADIENT, Errors, Truth, relative_error, true_results
from perilune.kernels.registry import Inputs, load_attr

FAULTS = (ImportError, RuntimeError, ValueError, TypeError, AssertionError, UnsupportedError)
"""Of a peer that cannot run here: written into its row, so that our own time is not lost."""


NONE = Errors(None, None)


class Ready(NamedTuple):
    peer: Peer
    contender: Contender | None
    errors: Errors
    """Against the same truth as ours."""
    note: str
    """Why there is no contender, or what it cannot do."""


def ready(peer: Peer, case: Case, copies: Copies, truth: Truth) -> Ready:
    """A peer bound to every copy of the inputs, or the reason why it is not."""
    if not peer.is_installed:
        return Ready(peer, None, NONE, "not installed")
    try:
        bind, first, made = load_attr(peer.bind), copies.copies[0], prepared(peer, copies)
        own = {name: x for name, x in first.items() if name not in copies.shared}
        bound_once = bind(clone(own) | copies.shared | made, case.backward)
        errors = _errors(bound_once, first, truth)
        bound = [bind(inputs | made, case.backward) for inputs in copies.copies]
        calls = [each.call for each in bound]
        eager = Contender(peer.name, calls, backward=case.backward)
        eager.round()
    except FAULTS as fault:
        return Ready(peer, None, NONE, f"failed: {_first_line(fault)}")
    if not (case.graph and torch.cuda.is_available()):
        return Ready(peer, eager, errors, "")
    try:
        return Ready(peer, GraphContender(peer.name, calls), errors, "")
    except FAULTS as fault:
        return Ready(peer, eager, errors, f"eager, cannot be captured: {_first_line(fault)}")


def prepared(peer: Peer, copies: Copies) -> Inputs:
    """What it makes of the inputs that all copies share."""
    if peer.prepare is None:
        return {}
    assert copies.shared, f"{peer.name}: every copy would get the first one's"
    return load_attr(peer.prepare)(copies.copies[0])


def _first_line(fault: BaseException) -> str:
    return str(fault).partition("\n")[0] or type(fault).__name__


def _errors(bound: Bound, inputs: Inputs, truth: Truth) -> Errors:
    """`bound` holds its own copy of what `inputs` does not share."""
    if truth.backward:
        out = bound.call()
    else:
        with torch.inference_mode():
            out = bound.call()
    got = {f"output {i}": x for i, x in enumerate(bound.outputs(out))}
    if truth.backward and bound.gradients is not None:
        got |= {f"{GRADIENT}{name}": x for name, x in bound.gradients(out).items()}
    if truth.excerpt is not None:
        got, inputs = truth.excerpt.results(got), truth.excerpt.inputs(inputs)
    want = true_results(clone(inputs), truth)
    return Errors.of({name: relative_error(x, want[name]) for name, x in got.items()})


def versions(peers: Sequence[Peer]) -> dict[str, str]:
    """Of every distribution among them; those that are missing say so."""
    return {peer.distribution: _version(peer.distribution) for peer in peers}


def _version(distribution: str) -> str:
    try:
        return version(distribution)
    except PackageNotFoundError:
        return "not installed"
