"""Faults that are planted in the functions around Triton's kernels, and the check that sees one."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any, NamedTuple

from perilune.kernels.registry import spec
from perilune.kernels.testing import check, check_properties


class Fault(NamedTuple):
    name: str
    op: str
    owner: Any
    attr: str
    wrong: Callable[..., Callable[..., Any]]
    """From what `owner.attr` is to what it becomes."""
    case: str = ""
    """The conformance case that finds it; without one the family of strides does."""


def red(op: str, case: str) -> list[str]:
    """What is wrong in the eyes of one conformance case, or of the family of strides."""
    declared = spec(op)
    if case:
        one = replace(declared, cases={case: declared.cases[case]})
        results = check(one, backend="cuda", tier="cpu")
    else:
        families = ("strides",)
        results = check_properties(declared, drawn=4, backend="cuda", tier="cpu", families=families)
    return [f"{r.case}: {r.what}" for r in results if not r.passed]


def plant(fault: Fault, monkeypatch: Any) -> None:
    monkeypatch.setattr(fault.owner, fault.attr, fault.wrong(getattr(fault.owner, fault.attr)))
