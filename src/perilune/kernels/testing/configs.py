"""Every configuration that an autotuner may choose, not only the one that it chose here."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import partial
from importlib import import_module
from typing import Any

from perilune.kernels.testing.compare import compare
from perilune.kernels.testing.conformance import with_inference
from perilune.kernels.testing.result import Case, Finding
from perilune.kernels.testing.subject import Draw, Subject


def configs(subject: Subject) -> Iterator[Case]:
    """A backend's module may have CONFIGS, keyword settings that its op takes beside its inputs."""
    module = import_module(subject.implementation.path.partition(":")[0])
    lengths = subject.shapes[-1]
    for config in getattr(module, "CONFIGS", ()):
        settings = " ".join(f"{name}={value}" for name, value in config.items())
        yield subject.case(settings, _config, lengths, config)


def _config(
    subject: Subject, draw: Draw, lengths: tuple[int, ...], config: Mapping[str, Any]
) -> Iterator[Finding]:
    inputs = draw(*lengths)
    op = partial(subject.op, **config)
    got = subject.run_on(subject.placed(inputs, grad=True), grad=True, op=op)
    inferred = subject.run_on(subject.placed(inputs, grad=False), op=op)
    got |= {f"inference {what}": x for what, x in inferred.items()}
    truth = draw.truth(inputs, grad=True)
    found = compare(got, with_inference(truth), subject.tolerance)
    return draw.conditioned(found, inputs, truth, grad=True)
