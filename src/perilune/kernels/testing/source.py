"""The source of a backend: nothing in it that fools a benchmark or hides an error."""

from __future__ import annotations

import ast
import inspect
from collections.abc import Iterator
from importlib import import_module

from perilune.kernels.testing.compare import holds
from perilune.kernels.testing.implementation import REFERENCE
from perilune.kernels.testing.result import Case, Finding
from perilune.kernels.testing.subject import Draw, Subject

_CALLS = {
    "_getframe": "looks at its caller",
    "currentframe": "looks at its caller",
    "inspect.stack": "looks at its caller",
    "data_ptr": "looks at addresses",
    "set_default_dtype": "changes a global setting",
    "set_float32_matmul_precision": "changes a global setting",
    "use_deterministic_algorithms": "changes a global setting",
    "manual_seed": "changes a global setting",
    "Stream": "leaves the current stream",
    "Thread": "works in another thread",
    "ThreadPoolExecutor": "works in another thread",
}


def source(subject: Subject) -> Iterator[Case]:
    if subject.backend != REFERENCE:
        yield subject.case("its own module", _scanned)


def _scanned(subject: Subject, draw: Draw) -> Iterator[Finding]:
    module = import_module(subject.implementation.path.partition(":")[0])
    found = list(offences(inspect.getsource(module)))
    yield holds("; ".join(found) or "nothing hidden", not found)


def offences(text: str) -> Iterator[str]:
    """What a reader should be told of, each with its line."""
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.ExceptHandler) and not _raises(node):
            yield f"line {node.lineno} swallows an exception"
        if isinstance(node, ast.Call):
            called = ast.unparse(node.func)
            reason = _CALLS.get(called) or _CALLS.get(called.rpartition(".")[2])
            if reason:
                yield f"line {node.lineno} {reason} ({called})"
        if isinstance(node, ast.Assign | ast.AugAssign):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            if any("backends" in ast.unparse(target) for target in targets):
                yield f"line {node.lineno} changes a global setting (torch.backends)"


def _raises(handler: ast.ExceptHandler) -> bool:
    return any(isinstance(node, ast.Raise) for node in ast.walk(handler))
