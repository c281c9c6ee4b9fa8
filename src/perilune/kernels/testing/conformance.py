"""Conformance: an implementation against the truth, in outputs, states and gradients."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch

from perilune.core.errors import UnsupportedError
from perilune.kernels.registry import Inputs, OpSpec, load_attr
from perilune.kernels.testing.compare import Results, compare
from perilune.kernels.testing.conditioning import conditioned
from perilune.kernels.testing.implementation import Implementation, implementations
from perilune.kernels.testing.result import CheckResult
from perilune.kernels.testing.run import as_double, placed, run


def check(
    spec: OpSpec, *, seed: int = 0, backend: str | None = None, tier: str | None = None
) -> Iterator[CheckResult]:
    """Every case of `implementations(spec, backend, tier)` in each dtype served.

    The oracle runs in float64 on the same inputs. An implementation runs twice: with gradients,
    and as in inference, where it may take another path. What it refuses in an `UnsupportedError`
    passes and is marked.

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
                label = each.label(dtype)
                oracle = load_attr(spec.oracle)
                for found in _findings(each, inputs, want, dtype, oracle):
                    what, error, bound, refused = found
                    yield CheckResult(
                        spec.name, name, label, what, error, bound, seed=seed, refused=refused
                    )


def _findings(
    each: Implementation,
    inputs: Inputs,
    want: Results,
    dtype: torch.dtype,
    oracle: Callable[..., Any],
) -> Iterator[tuple[str, float, float, bool]]:
    """What is compared, and with it what is refused or fails, with gradients and without."""
    # The interpreter is slow, and a kernel the same in both modes.
    for grad in (True,) if each.interpreted else (True, False):
        how = "with gradients" if grad else "in inference"
        asked = {what: x for what, x in want.items() if what.startswith("inference ") != grad}
        try:
            got = run_in(each, inputs, (grad,))
        except UnsupportedError as error:
            yield f"{how} refused: {error}", 0.0, 0.0, True
        # A plug-in may raise anything, and whatever it raises is a finding.
        except Exception as error:
            if each.plugin is None:
                raise
            yield f"{how} raised {type(error).__name__}: {error}", math.inf, 0.0, False
        else:
            found = compare(got, asked, each.tolerance[dtype])
            for finding in conditioned(found, dtype, oracle, inputs, want, grad=True):
                yield *finding, False


def with_inference(want: Results) -> Results:
    """The truth, asked for a second time without gradients."""
    forward = {what: x for what, x in want.items() if not what.startswith("grad ")}
    return want | {f"inference {what}": x for what, x in forward.items()}


def run_in(each: Implementation, inputs: Inputs, modes: Iterable[bool]) -> Results:
    """With gradients (True), and as in inference (False)."""
    op, results = each.load(), {}
    for grad in modes:
        copies = placed(inputs, each.device, grad=grad, guarded=each.interpreted)
        found = run(op, copies, grad=grad, guarded=each.interpreted)
        results |= {what if grad else f"inference {what}": x for what, x in found.items()}
    return results
