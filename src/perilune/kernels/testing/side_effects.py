"""What a call leaves behind: changed in-place inputs, and nothing else."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from perilune.kernels.testing.compare import compare, holds, same_bits
from perilune.kernels.testing.result import Case, Finding
from perilune.kernels.testing.subject import Draw, Subject


def side_effects(subject: Subject) -> Iterator[Case]:
    for lengths in subject.shapes:
        tail = f"lengths {'+'.join(map(str, lengths))}"
        for grad in subject.modes:
            how = "with gradients" if grad else "in inference"
            yield subject.case(f"{how}, {tail}", _nothing_left, lengths, grad)
        if True in subject.modes:
            case = f"with gradients after inference, {tail}"
            yield subject.case(case, _trained_after_inference, lengths)


def _trained_after_inference(
    subject: Subject, draw: Draw, lengths: tuple[int, ...]
) -> Iterator[Finding]:
    """What a call in inference keeps for the next one must not be an inference tensor."""
    inputs = draw(*lengths)
    first = subject.run(inputs)
    second = subject.run(inputs, grad=True)
    return compare({what: second[what] for what in first}, first, subject.tolerance)


def _nothing_left(
    subject: Subject, draw: Draw, lengths: tuple[int, ...], grad: bool
) -> Iterator[Finding]:
    inputs = subject.placed(draw(*lengths), grad=grad)
    before = {
        name: value.detach().clone() for name, value in inputs.items() if isinstance(value, Tensor)
    }
    settings = global_state()
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        subject.run_on(inputs, grad=grad)
    now = global_state()
    for name, was in settings.items():
        yield holds(f"{name} unchanged", now[name] == was)
    yield holds("no warning", not warned)
    for name, was in before.items():
        if name not in subject.traits.written:
            yield holds(f"{name} unchanged", same_bits(inputs[name], was))


def global_state() -> dict[str, Any]:
    """Torch's settings, and a checksum of its random numbers to come."""
    state: dict[str, Any] = {
        "default dtype": torch.get_default_dtype(),
        "default device": torch.get_default_device(),
        "fp32 matmul precision": torch.get_float32_matmul_precision(),
        "tf32": torch.backends.cuda.matmul.allow_tf32,
        "bf16 reduction": torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction,
        "cudnn tf32": torch.backends.cudnn.allow_tf32,
        "cudnn benchmark": torch.backends.cudnn.benchmark,
        "deterministic algorithms": torch.are_deterministic_algorithms_enabled(),
        "denormals": float(torch.tensor(1e-40) * 1.0),
        "gradient mode": torch.is_grad_enabled(),
        "threads": torch.get_num_threads(),
        "random numbers": bytes(torch.get_rng_state().numpy()),
    }
    if torch.cuda.is_available():
        state["cuda random numbers"] = bytes(torch.cuda.get_rng_state().numpy())
        state["cuda stream"] = torch.cuda.current_stream()
    return state
