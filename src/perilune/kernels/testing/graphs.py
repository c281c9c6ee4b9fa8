"""CUDA graphs: captured once, replayed with other values and indices in the same memory."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from perilune.kernels.registry import Inputs
from perilune.kernels.testing.compare import Results, identical
from perilune.kernels.testing.result import Case, Finding
from perilune.kernels.testing.subject import Draw, Subject


def graphs(subject: Subject) -> Iterator[Case]:
    """Of backends that declare it, on their device."""
    declared = subject.implementation.backend in subject.traits.graphs
    if declared and subject.device == "cuda":
        lengths = subject.shapes[-1]
        yield subject.case("replayed with other values and indices", _replayed, lengths)


def _replayed(subject: Subject, draw: Draw, lengths: tuple[int, ...]) -> Iterator[Finding]:
    old, new, newer = draw(*lengths), draw(*lengths), draw(*lengths)
    with torch.inference_mode():
        buffers = subject.placed(old, grad=False)
        graph, out = _captured(subject, buffers)
        for values in (new, newer):
            want = subject.run(values)
            _overwrite(buffers, values)
            graph.replay()
            torch.cuda.synchronize()
            yield from identical(_results(subject, out, buffers), want)


def _captured(subject: Subject, buffers: Inputs) -> tuple[torch.cuda.CUDAGraph, Any]:
    """A graph of one call on a stream that is not the default one: kernels must follow it."""
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(3):
            subject.op(**buffers)
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = subject.op(**buffers)
    return graph, out


def _overwrite(buffers: Inputs, values: Inputs) -> None:
    for name, value in values.items():
        if isinstance(value, Tensor):
            buffers[name].copy_(value)


def _results(subject: Subject, out: Any, buffers: Inputs) -> Results:
    outputs = [out] if isinstance(out, Tensor) else [x for x in out if x is not None]
    results = {f"output {i}": x for i, x in enumerate(outputs)}
    changed = {name: buffers[name] for name in subject.traits.written}
    return results | {f"after {name}": x for name, x in changed.items() if x is not None}
