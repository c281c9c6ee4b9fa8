"""One implementation of an op at one size, allowed to be timed.

Refused before any clock starts: a red op, a device whose backend is missing, a dtype that is not
served, and a backend that hands the case to the reference.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from perilune.kernels.bench.cases import Bench, Case, bench
from perilune.kernels.bench.contender import Contender, GraphContender
from perilune.kernels.bench.errors import NotRunError, RedOpError, RefusedError
from perilune.kernels.bench.inputs import TIMES_CACHE, Copies, cache_bytes, thunks
from perilune.kernels.bench.ran import code_of, entered
from perilune.kernels.bench.rounds import Settings
from perilune.kernels.bench.stopwatch import Stopwatch
from perilune.kernels.bench.verify import Truth, mutated_names
from perilune.kernels.registry import OpSpec, Tolerance, load_attr
from perilune.kernels.testing import check

REFERENCE = "reference"
MIN_ROUND_S = {"cuda": 1e-2, "cpu": 0.0}
"""Long enough that neither a synchronisation blurs what the two clocks say, nor the first launch
from Python what is reported: a GPU waits 0.1 to 0.3 ms for it, by how busy the host is."""
LOW_BYTES_PER_S = {"cuda": 1e12, "cpu": 5e9}
"""What any such device reads from its memory."""
LONG_CALL_S = {"cuda": 0.1, "cpu": math.inf}
"""Such a call is a round of its own, whose values change before the next as in any other: what
copies would add is time alone."""
MAX_BYTES = {"cuda": 24 << 30, "cpu": 1 << 30}
"""Of all copies of the inputs."""


class Chosen(NamedTuple):
    backend: str
    """`reference` or a device type."""
    path: str
    tolerance: Mapping[torch.dtype, Tolerance]


def choose(op: OpSpec, device: str, backend: str | None) -> Chosen:
    """What serves `op` on `device`: its backend there, or by that name the reference.

    Raises:
        NotRunError: a backend is asked for by name that is not declared.
    """
    if backend not in (None, REFERENCE, device):
        raise NotRunError(f"{op.name}: {backend} cannot be measured on {device}")
    if backend != REFERENCE and device in op.backends:
        tolerance = op.backend_tolerance.get(device, op.tolerance)
        return Chosen(device, op.backends[device], tolerance)
    if backend == device:
        raise NotRunError(f"{op.name} declares no {device} backend: its reference would run")
    return Chosen(REFERENCE, op.reference, op.tolerance)


def require_green(op: OpSpec, backend: str) -> None:
    """Runs the op's conformance.

    Raises:
        RedOpError: a check is red; the first ones are named.
    """
    red = [result for result in check(op, backend=backend) if not result.passed]
    if red:
        shown = "; ".join(
            f"{r.case}, {r.what}: {r.error:.1e} (bound {r.bound:.0e})" for r in red[:3]
        )
        raise RedOpError(f"{op.name} on {backend}: {len(red)} checks are red: {shown}")


@dataclass(frozen=True, kw_only=True)
class Subject:
    what: str
    """For messages: op, case and backend."""
    backend: str
    case: Case
    declared: Bench
    truth: Truth
    copies: Copies
    main: Contender
    """What the reported time is of."""
    eager: Contender

    @property
    def num_copies(self) -> int:
        return len(self.copies.copies)


def subject(
    op: OpSpec,
    case_name: str,
    chosen: Chosen,
    device: torch.device,
    stopwatch: Stopwatch,
    settings: Settings,
) -> Subject:
    """Inputs, calls and truth of one case.

    Raises:
        NotRunError: another implementation was entered than the chosen one.
        RefusedError: the dtype of the case has no declared tolerance.
    """
    declared = bench(op.name)
    case = declared.cases[case_name]
    what = f"{op.name} {case_name} on {chosen.backend}"
    if case.dtype not in chosen.tolerance:
        dtype = str(case.dtype).removeprefix("torch.")
        raise RefusedError(f"{what}: {dtype} is not served (no tolerance declared)")
    run, reference = load_attr(chosen.path), load_attr(op.reference)
    copies = Copies(case, device)
    one_call = Contender(what, [*thunks(run, copies.copies, case.backward)], backward=case.backward)
    _require_entered(one_call, run, reference, what)
    call_s = stopwatch.time(one_call.round).seconds
    bytes_read = copies.bytes_each
    if case.shared is not None:
        bytes_read = declared.work(copies.copies[0], case.backward).bytes
    _make_copies(copies, bytes_read, call_s, case.graph, device, settings)
    calls = [*thunks(run, copies.copies, case.backward)]
    eager = Contender("eager", calls, backward=case.backward)
    in_graph = case.graph and device.type == "cuda"
    truth = Truth(
        reference=reference,
        tolerance=chosen.tolerance[case.dtype],
        mutated=mutated_names(op.signature),
        backward=case.backward,
        excerpt=declared.excerpt if case.excerpt is None else case.excerpt,
    )
    return Subject(
        what=what,
        backend=chosen.backend,
        case=case,
        declared=declared,
        truth=truth,
        copies=copies,
        main=GraphContender(what, calls) if in_graph else eager,
        eager=eager,
    )


def _make_copies(
    copies: Copies,
    bytes_read: int,
    call_s: float,
    graph: bool,
    device: torch.device,
    settings: Settings,
) -> None:
    size = settings.rotate_bytes
    if size is None:
        size = TIMES_CACHE[device.type] * cache_bytes(device)
    slowest_read_s = bytes_read / LOW_BYTES_PER_S[device.type]
    # Cached inputs cannot speed up what takes a hundred times longer than to read them.
    if call_s >= LONG_CALL_S[device.type]:
        return
    copies.rotate_beyond(size if call_s < 100 * slowest_read_s else 0, bytes_read)
    affordable = MAX_BYTES[device.type] // max(1, copies.bytes_each)
    # `call_s` is mostly launch where a graph is asked for.
    shortest_s = max(1e-7, call_s / 5 if graph else call_s)
    copies.extend_to(min(affordable, int(MIN_ROUND_S[device.type] / shortest_s) + 1))


def _require_entered(
    one_call: Contender, run: Callable[..., Any], reference: Callable[..., Any], what: str
) -> None:
    own, true = code_of(run), code_of(reference)
    seen = entered(one_call.round, {code for code in (own, true) if code is not None})
    if own is not None and own not in seen:
        raise NotRunError(f"{what}: the call did not enter it")
    if true is not own and true in seen:
        raise NotRunError(f"{what}: the call was handed to the reference")
