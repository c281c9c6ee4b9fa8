"""Conformance: an implementation against the truth, in outputs, states and gradients."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import torch

from perilune.kernels.registry import Inputs, OpSpec, load_attr
from perilune.kernels.testing.compare import Results, compare
from perilune.kernels.testing.implementation import Implementation, implementations
from perilune.kernels.testing.result import CheckResult
from perilune.kernels.testing.run import as_double, placed, run


def check(
    spec: OpSpec, *, seed: int = 0, backend: str | None = None, tier: str | None = None
) -> Iterator[CheckResult]:
    """Every case of `implementations(spec, backend, tier)` in each dtype served.

    The oracle runs in float64 on the same inputs. An implementation runs twice: with gradients,
    and as in inference, where it may take another path.

    Raises:
        UnsupportedError: a device is asked for that is not here.
    """
    chosen = implementations(spec, backend, tier)
    for dtype in dict.fromkeys(dtype for each in chosen for dtype in each.tolerance):
        serving = [each for each in chosen if dtype in each.tolerance]
        for index, (name, make) in enumerate(spec.cases.items()):
            generator = torch.Generator().manual_seed(seed * 1000 + index)
            inputs = make(generator, dtype)
            want = with_inference(run(load_attr(spec.oracle), as_double(inputs), grad=True))
            for each in serving:
                # The interpreter is slow, and a kernel the same in both modes.
                modes = (True,) if each.interpreted else (True, False)
                got = run_in(each, inputs, modes)
                asked = want if False in modes else _forward_and_gradients(want)
                for found in compare(got, asked, each.tolerance[dtype]):
                    yield CheckResult(spec.name, name, each.label(dtype), *found, seed=seed)


def with_inference(want: Results) -> Results:
    """The truth, asked for a second time without gradients."""
    forward = {what: x for what, x in want.items() if not what.startswith("grad ")}
    return want | {f"inference {what}": x for what, x in forward.items()}


def _forward_and_gradients(want: Results) -> Results:
    return {what: x for what, x in want.items() if not what.startswith("inference ")}


def run_in(each: Implementation, inputs: Inputs, modes: Iterable[bool]) -> Results:
    """With gradients (True), and as in inference (False)."""
    op, results = load_attr(each.path), {}
    for grad in modes:
        copies = placed(inputs, each.device, grad=grad, guarded=each.interpreted)
        found = run(op, copies, grad=grad, guarded=each.interpreted)
        results |= {what if grad else f"inference {what}": x for what, x in found.items()}
    return results
