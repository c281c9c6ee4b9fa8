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
from perilune.kernels.bench.verify import Truth, relative_error, true_results
from perilune.kernels.registry import Inputs, load_attr

FAULTS = (ImportError, RuntimeError, ValueError, TypeError, AssertionError, UnsupportedError)
"""Of a peer that cannot run here: written into its row, so that our own time is not lost."""


class Ready(NamedTuple):
    peer: Peer
    contender: Contender | None
    error: float | None
    """Against the same truth as ours."""
    note: str
    """Why there is no contender, or what it cannot do."""


def ready(peer: Peer, case: Case, copies: Copies, truth: Truth) -> Ready:
    """A peer bound to every copy of the inputs, or the reason why it is not."""
    if not peer.is_installed:
        return Ready(peer, None, None, "not installed")
    try:
        bind = load_attr(peer.bind)
        error = _error(bind(clone(copies.copies[0]), case.backward), copies.copies[0], truth)
        bound = [bind(inputs, case.backward) for inputs in copies.copies]
        calls = [each.call for each in bound]
        eager = Contender(peer.name, calls, backward=case.backward)
        eager.round()
    except FAULTS as fault:
        return Ready(peer, None, None, f"failed: {_first_line(fault)}")
    if not (case.graph and torch.cuda.is_available()):
        return Ready(peer, eager, error, "")
    try:
        return Ready(peer, GraphContender(peer.name, calls), error, "")
    except FAULTS as fault:
        return Ready(peer, eager, error, f"eager, cannot be captured: {_first_line(fault)}")


def _first_line(fault: BaseException) -> str:
    return str(fault).partition("\n")[0] or type(fault).__name__


def _error(bound: Bound, inputs: Inputs, truth: Truth) -> float | None:
    """Largest relative error of its outputs, None where none is comparable.

    `bound` holds its own copy of `inputs`.
    """
    if truth.backward:
        outputs = bound.outputs(bound.call())
    else:
        with torch.inference_mode():
            outputs = bound.outputs(bound.call())
    got = {f"output {i}": x for i, x in enumerate(outputs)}
    if truth.excerpt is not None:
        got, inputs = truth.excerpt.results(got), truth.excerpt.inputs(inputs)
    want = true_results(clone(inputs), truth)
    return max((relative_error(x, want[name]) for name, x in got.items()), default=None)


def versions(peers: Sequence[Peer]) -> dict[str, str]:
    """Of every distribution among them; those that are missing say so."""
    return {peer.distribution: _version(peer.distribution) for peer in peers}


def _version(distribution: str) -> str:
    try:
        return version(distribution)
    except PackageNotFoundError:
        return "not installed"
