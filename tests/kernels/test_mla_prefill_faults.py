"""Faults planted in Triton's prefill: each turns a check red."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import pytest
import torch
from triton_faults import Fault, plant, red

from perilune.kernels.mla import triton_prefill_backward as backward
from perilune.kernels.mla import triton_prefill_forward as forward
from perilune.kernels.mla import triton_prefill_graph as graph
from perilune.kernels.mla.triton_prefill import mla_prefill
from perilune.kernels.registry import load_attr, spec
from perilune.kernels.testing.compare import compare
from perilune.kernels.testing.run import as_double, placed, run


class Launch:
    """A kernel that is started with other arguments, by their names."""

    def __init__(self, run: Any, change: Callable[[dict[str, Any]], dict[str, Any]]) -> None:
        self.run, self.change = run, change

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., Any]:
        def start(*values: Any, **meta: Any) -> Any:
            given = dict(zip(self.run.arg_names, values, strict=False))
            return self.run[grid](*(given | self.change(given)).values(), **meta)

        return start


def given(**changes: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """Each named argument is what its function makes of it."""

    def change(x: dict[str, Any]) -> dict[str, Any]:
        return {name: of(x[name]) for name, of in changes.items()}

    return lambda run: Launch(run, change)


def times(by: float) -> Callable[[Any], Any]:
    return lambda x: x * by


def nothing(x: Any) -> Any:
    return torch.zeros_like(x)


def column(at: int, of: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """A table with another column."""

    def change(table: Any) -> Any:
        changed = table.clone()
        changed[:, at] = of(table[:, at])
        return changed

    return change


def documents_joined(run):
    return lambda packing: None


def documents_end_at_once(run):
    def wrong(packing):
        found = run(packing)
        return found and found._replace(end_T=found.first_T + 1)

    return wrong


def one_head_s_share(run):
    def wrong(*x):
        found = run(*x)
        return found._replace(shared_SR=found.shared_SR / x[0].q_THK.shape[1])

    return wrong


def rows_are_columns(run):
    return lambda x: (
        x if x.is_contiguous() else x.as_strided(x.shape, torch.empty(x.shape).stride())
    )


def masked_tiles_only(run):
    """Tiles that all queries see whole are left out."""
    return lambda lengths, *x: run(lengths, *x)._replace(
        query_I4=column(2, lambda k: k + 32)(run(lengths, *x).query_I4)
    )


OP = "mla_prefill"
FORWARD, QUERIES, KEYS = (forward, "_forward"), (backward, "_queries"), (backward, "_keys")
NEXT, LAST = (lambda x: x + 1), (lambda x: x - 1)
FAULTS = [
    Fault("natural base", OP, *FORWARD, given(scale=times(0.6931)), "odd_lengths"),
    Fault("own key unseen", OP, *FORWARD, given(query_p=column(3, LAST)), "odd_lengths"),
    Fault("next key seen", OP, *FORWARD, given(query_p=column(3, NEXT)), "odd_lengths"),
    Fault("no key in front", OP, *FORWARD, given(query_p=column(3, nothing)), "cached_in_front"),
    Fault("other sequences seen", OP, *FORWARD, given(query_p=column(2, nothing)), "odd_lengths"),
    Fault("last query lost", OP, *FORWARD, given(query_p=column(1, LAST)), "odd_lengths"),
    Fault("whole tiles lost", OP, graph, "tiles", masked_tiles_only, "beyond_a_tile"),
    Fault("documents joined", OP, graph, "documents", documents_joined, "long_documents"),
    Fault("first document only", OP, *FORWARD, given(first_p=nothing), "segmented_rows"),
    Fault("sums of scores lost", OP, *QUERIES, given(lse_p=nothing), "odd_lengths"),
    Fault("dq unscaled", OP, *QUERIES, given(unit=times(2.0)), "odd_lengths"),
    Fault("dq of a natural base", OP, *QUERIES, given(scale=times(0.6931)), "odd_lengths"),
    Fault("dq sees the next key", OP, *QUERIES, given(query_p=column(3, NEXT)), "odd_lengths"),
    Fault("dq of other documents", OP, *QUERIES, given(first_p=nothing), "segmented_rows"),
    Fault("delta forgotten", OP, *KEYS, given(delta_p=nothing), "odd_lengths"),
    Fault("dk unscaled", OP, *KEYS, given(unit=times(2.0)), "odd_lengths"),
    Fault("dk of a natural base", OP, *KEYS, given(scale=times(0.6931)), "odd_lengths"),
    Fault("dk without its own query", OP, *KEYS, given(key_p=column(4, LAST)), "odd_lengths"),
    Fault("dk of earlier queries", OP, *KEYS, given(key_p=column(4, NEXT)), "odd_lengths"),
    Fault("dk without the last query", OP, *KEYS, given(key_p=column(3, LAST)), "odd_lengths"),
    Fault("last key lost", OP, *KEYS, given(key_p=column(1, LAST)), "odd_lengths"),
    Fault("dk of other documents", OP, *KEYS, given(first_p=nothing), "segmented_rows"),
    Fault("documents cut", OP, graph, "documents", documents_end_at_once, "long_documents"),
    Fault("one head's share", OP, graph, "backward", one_head_s_share, "odd_lengths"),
    Fault("rows contiguous", OP, graph, "row_major", rows_are_columns),
    Fault("heads contiguous", OP, *FORWARD, given(q_head=lambda x: x // 2)),
    Fault("shared rows contiguous", OP, *FORWARD, given(r_stride=lambda x: x // 2)),
    Fault("value rows contiguous", OP, *FORWARD, given(v_stride=lambda x: x // 2)),
]


@cache
def case(name: str) -> tuple[Any, Any]:
    """A conformance case and its truth: the reference in float64, faster than the oracle."""
    inputs = spec(OP).cases[name](torch.Generator().manual_seed(3), torch.float32)
    return inputs, run(load_attr(spec(OP).reference), as_double(inputs), grad=True)


def is_right(name: str) -> bool:
    inputs, want = case(name)
    got = run(mla_prefill, placed(inputs, "cpu", grad=True, guarded=True), grad=True, guarded=True)
    found = list(compare(got, want, spec(OP).tolerance[torch.float32]))
    assert found
    return all(error <= bound for _, error, bound in found)


@pytest.mark.parametrize("name", sorted({fault.case for fault in FAULTS} - {""}))
def test_what_finds_faults_is_right_without_them(name):
    assert is_right(name)


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.name)
def test_a_fault_is_found(fault, monkeypatch):
    plant(fault, monkeypatch)
    assert not is_right(fault.case) if fault.case else red(OP, "")


@pytest.mark.parametrize(
    ("name", "queries", "keys"),
    [("cached_in_front", 32, 16), ("long_documents", 32, 16), ("cached_in_front", 16, 32)],
)
def test_tiles_that_are_not_square_are_right(name, queries, keys, monkeypatch):
    """As the tiles of bf16, which the interpreter cannot multiply."""
    tile = forward.Tile(queries, keys, 4, 2)
    monkeypatch.setattr(forward, "FP32_TILE", tile)
    monkeypatch.setattr(backward, "FP32_QUERY_TILE", tile)
    monkeypatch.setattr(backward, "FP32_KEY_TILE", tile)
    assert is_right(name)
