"""A refusal is no mistake, but a backend that refuses all it is given has shown nothing."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from perilune.kernels.registry import OpSpec
from perilune.kernels.testing.compare import holds
from perilune.kernels.testing.implementation import Implementation
from perilune.kernels.testing.lengths import REFUSED_OR_EMPTY
from perilune.kernels.testing.result import CheckResult


def refusals(
    spec: OpSpec, chosen: Sequence[Implementation], results: Sequence[CheckResult], seed: int
) -> Iterator[CheckResult]:
    """Of each implementation and dtype that refused anything: whether `results`, all that was found
    of it, hold a comparison and, unless it declares to be forward only, one of a gradient."""
    for each in chosen:
        for dtype in each.tolerance:
            label = each.label(dtype)
            mine = [r for r in results if (r.op, r.backend) == (spec.name, label)]
            if not any(r.refused for r in mine):
                continue
            ran = [r for r in mine if not (r.refused or _shows_nothing(r))]
            shown = {"something is served": bool(ran)}
            if not each.forward_only and _asks_for_gradients(spec, dtype):
                shown["a gradient is served"] = any(r.what.startswith("grad ") for r in ran)
            for what, true in shown.items():
                finding = holds(what, true)
                yield CheckResult(spec.name, "all inputs", label, *finding, "refusals", seed)


def _shows_nothing(result: CheckResult) -> bool:
    """What passes without a run."""
    return result.family == "source" or result.what == REFUSED_OR_EMPTY


def _asks_for_gradients(spec: OpSpec, dtype: torch.dtype) -> bool:
    drawn = (make(torch.Generator(), dtype) for make in spec.cases.values())
    return any(
        isinstance(x, Tensor) and x.requires_grad for inputs in drawn for x in inputs.values()
    )
