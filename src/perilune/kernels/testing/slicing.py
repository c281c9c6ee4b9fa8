"""Parts of an op's inputs and results: some sequences of a pack, or some tokens of a sequence."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from perilune.kernels.common.packing import Packing
from perilune.kernels.registry import Inputs
from perilune.kernels.testing.compare import Results
from perilune.kernels.traits import Traits


def of_sequences(traits: Traits, inputs: Inputs, chosen: Sequence[int]) -> Inputs:
    """The inputs of some sequences, in that order; without a packing, of some tokens."""
    tokens = _tokens_of(traits, inputs, chosen)
    part = dict(inputs)
    for name, axis in traits.tokens.items():
        part[name] = _take(inputs[name], axis, tokens)
    for name, axis in traits.sequences.items():
        if inputs[name] is not None:
            part[name] = _take(inputs[name], axis, list(chosen))
    if traits.packing:
        lengths = inputs[traits.packing].lengths
        part[traits.packing] = Packing.of([lengths[n] for n in chosen])
    return part


def of_tokens(traits: Traits, inputs: Inputs, start: int, end: int) -> Inputs:
    """Tokens start..end of a single sequence; its state stays what it was before the first."""
    part = dict(inputs)
    for name, axis in traits.tokens.items():
        part[name] = _take(inputs[name], axis, list(range(start, end)))
    part[traits.packing] = replace(inputs[traits.packing], lengths=(end - start,))
    return part


def results_of(traits: Traits, inputs: Inputs, results: Results, chosen: Sequence[int]) -> Results:
    """What `results` of `inputs` say of some sequences: outputs and states, not gradients."""
    tokens = _tokens_of(traits, inputs, chosen)
    part: Results = {}
    for index, axis in traits.token_outputs.items():
        part[f"output {index}"] = _take(results[f"output {index}"], axis, tokens)
    for index in traits.state_outputs.values():
        part[f"output {index}"] = _take(results[f"output {index}"], 0, list(chosen))
    for name in traits.in_place:
        rows = list(chosen)
        if traits.slots:
            rows = [int(inputs[traits.slots][n]) for n in chosen]
        part[f"after {name}"] = _take(results[f"after {name}"], 0, rows)
    return part


def num_sequences(traits: Traits, inputs: Inputs) -> int:
    if traits.packing:
        return inputs[traits.packing].num_sequences
    name, axis = next(iter(traits.tokens.items()))
    return inputs[name].shape[axis]


def _tokens_of(traits: Traits, inputs: Inputs, chosen: Sequence[int]) -> list[int]:
    if not traits.packing:
        return list(chosen)
    ends = inputs[traits.packing].cu_seqlens
    return [t for n in chosen for t in range(ends[n], ends[n + 1])]


def _take(x: Tensor, axis: int, rows: list[int]) -> Tensor:
    taken = x.detach().index_select(axis, torch.tensor(rows, dtype=torch.int64, device=x.device))
    return taken.requires_grad_(x.requires_grad)
