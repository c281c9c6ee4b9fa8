"""Every property that an op must have, beside agreeing with its truth on its cases."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any

from perilune.core.errors import UnsupportedError
from perilune.kernels.registry import OpSpec, load_attr
from perilune.kernels.testing.bugs import bugs
from perilune.kernels.testing.causality import causality
from perilune.kernels.testing.configs import configs
from perilune.kernels.testing.determinism import batches, determinism
from perilune.kernels.testing.drafts import drafts
from perilune.kernels.testing.drift import drift
from perilune.kernels.testing.graphs import graphs
from perilune.kernels.testing.implementation import Implementation, implementations
from perilune.kernels.testing.lengths import lengths, packs
from perilune.kernels.testing.poison import poison
from perilune.kernels.testing.pool import pool
from perilune.kernels.testing.regimes import regimes
from perilune.kernels.testing.result import Case, CheckResult
from perilune.kernels.testing.served import served
from perilune.kernels.testing.side_effects import side_effects
from perilune.kernels.testing.source import source
from perilune.kernels.testing.states import states
from perilune.kernels.testing.strides import strides
from perilune.kernels.testing.subject import Subject
from perilune.kernels.testing.tiers import Sizes, sizes_of
from perilune.kernels.traits import Traits

FIXED_SEEDS = (0, 1, 2)

Family = Callable[[Subject], Iterator[Case]]

FAMILIES: dict[str, Family] = {
    "source": source,
    "served": served,
    "side effects": side_effects,
    "poison": poison,
    "strides": strides,
    "pool": pool,
    "determinism": determinism,
    "batches": batches,
    "regimes": regimes,
    "lengths": lengths,
    "packs": packs,
    "states": states,
    "causality": causality,
    "drafts": drafts,
    "drift": drift,
    "configs": configs,
    "graphs": graphs,
    "bugs": bugs,
}


def check_properties(
    spec: OpSpec,
    *,
    drawn: int,
    backend: str | None = None,
    tier: str | None = None,
    families: Sequence[str] = tuple(FAMILIES),
    truths: dict[Any, Any] | None = None,
) -> Iterator[CheckResult]:
    """The property checks of `implementations(spec, backend, tier)`; none without traits.

    `drawn` is the seed beside the fixed ones; `truths` may be kept from op to op. What an
    implementation refuses in an `UnsupportedError` passes and is marked; any other exception is
    red.

    Raises:
        UnsupportedError: a device is asked for that is not here.
    """
    for subject in subjects(spec, drawn, backend, tier, truths):
        for family in families:
            yield from check_family(subject, family)


def check_family(subject: Subject, family: str) -> Iterator[CheckResult]:
    for case in FAMILIES[family](subject):
        yield from _results(subject, family, case)


def subjects(
    spec: OpSpec,
    drawn: int,
    backend: str | None = None,
    tier: str | None = None,
    truths: dict[Any, Any] | None = None,
) -> list[Subject]:
    """Each implementation in each dtype and at each width; none without traits.

    Raises:
        UnsupportedError: a device is asked for that is not here.
    """
    if spec.traits is None:
        return []
    truths = {} if truths is None else truths
    chosen = implementations(spec, backend, tier)
    return [subject for each in chosen for subject in _subjects(spec, each, drawn, truths)]


def _subjects(
    spec: OpSpec, each: Implementation, drawn: int, truths: dict[Any, Any]
) -> Iterator[Subject]:
    sizes, traits = sizes_of(each), load_attr(spec.traits or "")
    for dtype in each.tolerance:
        for width in _widths(traits, sizes):
            yield Subject(
                spec=spec,
                traits=_claimed(traits, each),
                implementation=each,
                dtype=dtype,
                sizes=sizes,
                width=width,
                seeds=(*FIXED_SEEDS, drawn),
                truths=truths,
            )


def _claimed(traits: Traits, each: Implementation) -> Traits:
    """With what a plug-in claims of itself; an own backend stands there already."""
    if each.plugin is None:
        return traits
    plugin, name = each.plugin.plugin, each.backend
    ahead = {name} if plugin.rounding_sees_ahead else set()
    return replace(
        traits,
        rounding_sees_ahead=traits.rounding_sees_ahead | ahead,
        batch_invariant={**traits.batch_invariant, name: plugin.batch_invariant},
        graphs=traits.graphs | ({name} if plugin.graphs else set()),
    )


def _widths(traits: Traits, sizes: Sizes) -> tuple[int, ...]:
    return traits.full_widths if sizes.full_width else traits.widths


def _results(subject: Subject, family: str, case: Case) -> Iterator[CheckResult]:
    backend = subject.implementation.label(subject.dtype)
    only = len(_widths(subject.traits, subject.sizes)) == 1
    name = case.name if only else f"{case.name}, width {subject.width}"
    found = 0

    def result(what: str, error: float, bound: float, *, refused: bool = False) -> CheckResult:
        op = subject.spec.name
        return CheckResult(op, name, backend, what, error, bound, family, case.seed, refused)

    try:
        for finding in case.findings():
            found += 1
            yield result(*finding)
    except UnsupportedError as error:
        yield result(f"refused: {error}", 0.0, 0.0, refused=True)
    # A kernel may raise anything, and whatever it raises is a finding.
    except Exception as error:
        yield result(f"raised {type(error).__name__}: {error}", math.inf, 0.0)
    else:
        if not found:
            yield result("nothing was compared", math.inf, 0.0)
