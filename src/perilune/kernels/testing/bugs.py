"""Inputs that revealed faults in comparable kernels, each by the smallest one known.

They are samples: the comment beside each says which property it samples, and the family of that
property checks it in general.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor

from perilune.kernels.common.cases import normal
from perilune.kernels.registry import Inputs
from perilune.kernels.testing.compare import compare, holds
from perilune.kernels.testing.poison import new_memory, surrounded
from perilune.kernels.testing.result import Case, Finding
from perilune.kernels.testing.slicing import of_sequences, results_of
from perilune.kernels.testing.states import two_pieces
from perilune.kernels.testing.strides import padded_rows, relaid
from perilune.kernels.testing.subject import Draw, Subject, against_truth

KDA = ("kda_chunk",)


class Bug(NamedTuple):
    name: str
    ops: tuple[str, ...]
    findings: Callable[..., Iterator[Finding]]
    arguments: tuple[Any, ...] = ()


def bugs(subject: Subject) -> Iterator[Case]:
    """The bug inputs of an op; an op that is named nowhere here has none."""
    for bug in BUGS if subject.sizes.thorough else ():
        if subject.spec.name in bug.ops:
            yield subject.case(bug.name, bug.findings, *bug.arguments)


def _length(subject: Subject, draw: Draw, length: int) -> Iterator[Finding]:
    grad = length <= subject.sizes.grad_tokens
    return against_truth(subject, draw, draw(length), grad=grad)


def _odd_width(subject: Subject, draw: Draw) -> Iterator[Finding]:
    """60 channels, and 1e30 behind the gates."""
    return surrounded(subject, draw.of_width(60), (17,), 1e30, False)


def _many_sequences(subject: Subject, draw: Draw) -> Iterator[Finding]:
    """More programs than a grid axis beyond the first may have: 65535."""
    sequences = 32769 if subject.sizes.full_width else 65
    inputs = draw(*(1,) * sequences)
    got = subject.run(inputs)
    last = of_sequences(subject.traits, inputs, [sequences - 1])
    want = results_of(subject.traits, last, subject.run(last), [0])
    ours = results_of(subject.traits, inputs, got, [sequences - 1])
    return compare(ours, want, subject.tolerance)


def _steady_gates(subject: Subject, draw: Draw, z: float, bound: float | None) -> Iterator[Finding]:
    """Every gate the same over 64 tokens: what overflows when exponents are not re-based."""
    inputs = draw(64 if subject.sizes.grad_tokens >= 64 else 17)
    return against_truth(subject, draw, _with_gates(inputs, z, bound), grad=True)


def _finite_gradients(subject: Subject, draw: Draw) -> Iterator[Finding]:
    """Gates saturated at the bound: no 0 * inf of pairs that are masked after exp."""
    long = {True: 4096, False: 129}[subject.sizes.full_width]
    inputs = _with_gates(draw(long if subject.sizes.grad_tokens >= 64 else 33), 40.0, -5.0)
    asking = {n: x.detach().requires_grad_() for n, x in inputs.items() if _real(x)}
    results = subject.run(inputs | asking, grad=True)
    for what, x in results.items():
        yield holds(f"{what} finite", bool(torch.isfinite(x).all()))


def _real(x: Any) -> bool:
    return isinstance(x, Tensor) and x.is_floating_point()


def _with_gates(inputs: Inputs, z: float, bound: float | None) -> Inputs:
    plain = {n: torch.zeros_like(inputs[n].detach()) for n in ("A_log_H", "dt_bias_HK")}
    same = torch.full_like(inputs["z_THK"].detach(), z)
    return inputs | plain | {"z_THK": same, "lower_bound": bound}


def _second_sample(subject: Subject, draw: Draw) -> Iterator[Finding]:
    """The first three tokens of the second of two packed samples, against that sample alone."""
    inputs = draw(9, 7)
    got = results_of(subject.traits, inputs, subject.run(inputs), [1])
    alone = of_sequences(subject.traits, inputs, [1])
    want = results_of(subject.traits, alone, subject.run(alone), [0])
    first = {"output 0": got["output 0"][:3]}
    return compare(first, {"output 0": want["output 0"][:3]}, subject.tolerance)


def _close_biases(subject: Subject, draw: Draw) -> Iterator[Finding]:
    """Biases 1e-3 apart around 8: in bf16 they would be one and the same."""
    inputs = draw(33)
    experts = inputs["bias_E"].shape[0]
    order = torch.randperm(experts, generator=draw.generator)
    bias = 8 + 1e-3 * order.to(inputs["bias_E"].dtype)
    level = {"logits_TE": torch.zeros_like(inputs["logits_TE"]).requires_grad_(), "bias_E": bias}
    return against_truth(subject, draw, inputs | level, grad=True)


def _close_logits(subject: Subject, draw: Draw) -> Iterator[Finding]:
    """Logits that differ below the precision of bf16: another set of experts if rounded to it."""
    inputs = draw(33)
    t, experts = inputs["logits_TE"].shape
    order = torch.rand(t, experts, generator=draw.generator).argsort(1)
    logits = 1 + 2.0**-12 * order.to(inputs["logits_TE"].dtype)
    level = {"logits_TE": logits, "bias_E": torch.zeros_like(inputs["bias_E"])}
    return against_truth(subject, draw, inputs | level, grad=False)


def _large(subject: Subject, draw: Draw, name: str) -> Iterator[Finding]:
    """|x| up to 100: a cap of 25 used as a clamp shows."""
    inputs = draw(17)
    large = 40 * inputs[name].detach()
    return against_truth(subject, draw, inputs | {name: large}, grad=False)


def _remainder(subject: Subject, draw: Draw) -> Iterator[Finding]:
    """Eight full banks and a remainder: nine sources, none of which is written to."""
    blocks = normal(draw.generator, subject.dtype, 8, 5, subject.width)
    return against_truth(subject, draw, draw(5) | {"blocks_NTD": blocks}, grad=True)


BUGS = (
    # F1. Masked loads: what lies beside an operand (family poison).
    Bug("F1 width that is no power of two", (*KDA, "kda_step"), _odd_width),
    # F2. Sizes far beyond the usual ones, along each axis (family lengths).
    Bug("F2 many sequences", (*KDA, "kda_step"), _many_sequences),
    # F3. Lengths that are no multiple of a tile (family lengths).
    Bug("F3 partial chunk of 65", KDA, _length, (65,)),
    Bug("F3 partial chunk of 127", KDA, _length, (127,)),
    Bug("F3 partial chunk of 200", KDA, _length, (200,)),
    # F4 and F6, a configuration that the autotuner may choose: every one runs in family configs.
    # F5. Memory that nobody wrote (family poison).
    Bug("F5 17 tokens into NaN", (*KDA, "causal_conv"), new_memory, ((17,), False)),
    # F7. Parameters are inputs, and inputs stay (family side effects).
    # F8. Gates at their extremes (family regimes).
    Bug("F8 gates of -5", KDA, _steady_gates, (40.0, -5.0)),
    Bug("F8 gates of -6", KDA, _steady_gates, (6.0, None)),
    Bug("F8 gates of -20", KDA, _steady_gates, (20.0, None)),
    # F9. Gradients at the extremes (family regimes).
    Bug("F9 gradients at the bound", KDA, _finite_gradients),
    # F10. Mixed bases of exponents: the truth at non-trivial gates (families regimes, lengths).
    Bug("F10 129 tokens", KDA, _length, (129,)),
    # F11. Final states are results like any output (families lengths, packs).
    Bug("F11 state after 63", KDA, _length, (63,)),
    Bug("F11 state after 500", KDA, _length, (500,)),
    # F12. Layouts (family strides).
    Bug("F12 strided queries", KDA, relaid, ((17,), padded_rows, ("q_THK",), False)),
    Bug("F12 strided state", KDA, relaid, ((17,), padded_rows, ("state_NHKV",), False)),
    # F13. Padding up to a tile must not act on the state (family states).
    Bug("F13 65 tokens, then one", (*KDA, "causal_conv"), two_pieces, (66, 65)),
    # F14, metadata of another chunk size: no op takes chunk metadata from its caller.
    # F15. A sequence without a token has a state like any other one (families lengths, packs).
    Bug(
        "F15 no token between others into NaN",
        (*KDA, "causal_conv"),
        new_memory,
        ((3, 0, 2), False),
    ),
    Bug("F15 no token at all into NaN", (*KDA, "causal_conv"), new_memory, ((0, 0), False)),
    # F16. Sequences in a pack do not see each other (family packs).
    Bug("F16 second sample", (*KDA, "causal_conv", "mla_prefill"), _second_sample),
    # F17, F18. What is compared, not only summed, stays in fp32 (the truth's expert numbers).
    Bug("F17 biases 1e-3 apart", ("router",), _close_biases),
    Bug("F18 logits closer than bf16", ("router",), _close_logits),
    # F19. The formula where it saturates (family regimes).
    Bug("F19 beyond the cap", ("situ",), _large, ("gate_up_2I",)),
    # F20. Inputs stay, whichever of them an output looks like (family side effects).
    Bug("F20 nine sources", ("attn_res",), _remainder),
)
