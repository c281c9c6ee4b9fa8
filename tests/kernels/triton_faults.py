"""Faults that are planted in Triton's kernels or the functions around them, and the check that sees
one."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Iterable
from dataclasses import replace
from pathlib import Path
from types import ModuleType
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


def plant_in_source(
    module: ModuleType,
    right: str,
    wrong: str,
    users: Iterable[ModuleType],
    folder: Path,
    monkeypatch: Any,
) -> None:
    """`module`'s functions, made of its source with the fault, wherever `users` have them."""
    source = Path(module.__file__).read_text()
    assert right in source
    path = folder / "faulty.py"
    path.write_text(source.replace(right, wrong))
    where = importlib.util.spec_from_file_location("faulty", path)
    faulty = importlib.util.module_from_spec(where)
    where.loader.exec_module(faulty)
    as_it_is, absent = dict(vars(module)), object()
    for user in users:
        for name, value in list(vars(user).items()):
            if value is as_it_is.get(name, absent) and name in vars(faulty):
                monkeypatch.setattr(user, name, vars(faulty)[name])
