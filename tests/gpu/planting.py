"""A fault of a source in CUDA C++, and a copy of the source that has it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from types import ModuleType
from typing import NamedTuple

from perilune.kernels.testing import CheckResult


class Fault(NamedTuple):
    right: str
    """Stands once in the source, or in its header."""
    wrong: str
    found_by: str
    """One of the checks."""


class Faults(NamedTuple):
    """Of one source."""

    programs: ModuleType
    """Has `SOURCE`, `HEADERS`, `kernel_of`, which compiles them, and `is_available`."""
    named: Mapping[str, Fault]
    checks: Mapping[str, Callable[[], Iterator[CheckResult]]]
    """Of the op, those that see what these programs make; the slowest first."""


def planted(fault: Fault, source: Path, header: Path, folder: Path) -> tuple[Path, Path]:
    """Copies of both in `folder`, the fault in one of them.

    Raises:
        ValueError: what it replaces does not stand there once.
    """
    texts = [path.read_text() for path in (source, header)]
    if sum(text.count(fault.right) for text in texts) != 1:
        raise ValueError(f"{fault.right!r} does not stand once in {source.name} and its header")
    copies = folder / source.name, folder / header.name
    for copy, text in zip(copies, texts, strict=True):
        copy.write_text(text.replace(fault.right, fault.wrong))
    return copies
