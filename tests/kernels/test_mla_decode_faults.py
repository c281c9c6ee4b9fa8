"""Faults planted in Triton's decode: each turns a check red."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from triton_faults import Fault, plant, red

from perilune.kernels.mla import triton as entry
from perilune.kernels.mla import triton_decode as kernels


class Launch:
    """A kernel that is started with other arguments."""

    def __init__(self, run: Any, change: Callable[..., tuple[Any, ...]], meta: Any) -> None:
        self.run, self.change, self.meta = run, change, meta

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., Any]:
        return lambda *x, **meta: self.run[grid](*self.change(*x), **meta | self.meta)


def launched(
    change: Callable[..., tuple[Any, ...]] = lambda *x: x, **meta: Any
) -> Callable[[Any], Any]:
    return lambda run: Launch(run, change, meta)


def equal_weights(partial, lse, *rest):
    return partial, torch.zeros_like(lse), *rest


def a_part_unmerged(partial, lse, o, parts):
    return partial, lse, o, max(1, parts - 1)


def wrong_scale(by: float):
    def change(*x):
        return *x[:-1], x[-1] * by

    return change


def more_tokens(by: int):
    def change(q, latent, partial, lse, q_stride, tokens, *rest):
        return q, latent, partial, lse, q_stride, tokens + by, *rest

    return change


def contiguous_queries(q, latent, partial, lse, q_stride, *rest):
    return q, latent, partial, lse, q.shape[1], *rest


def last_part_forgotten(run):
    def wrong(*x):
        found = run(*x)
        return found._replace(number=max(1, found.number - 1))

    return wrong


def rows_are_columns(run):
    return lambda x: x if x.is_contiguous() else x.as_strided(x.shape, (x.shape[1], 1))


FAULTS = [
    Fault(
        "equal weights", "mla_decode", kernels, "_merge", launched(equal_weights), "rising_scores"
    ),
    Fault(
        "a part unmerged", "mla_decode", kernels, "_merge", launched(a_part_unmerged), "odd_plain"
    ),
    Fault(
        "natural base", "mla_decode", kernels, "_attend", launched(wrong_scale(0.6931)), "odd_plain"
    ),
    Fault(
        "last token lost", "mla_decode", kernels, "_attend", launched(more_tokens(-1)), "odd_plain"
    ),
    Fault(
        "a token too many", "mla_decode", kernels, "_attend", launched(more_tokens(1)), "many_heads"
    ),
    Fault(
        "last part lost", "mla_decode", kernels, "parts_of", last_part_forgotten, "rising_scores"
    ),
    Fault("queries contiguous", "mla_decode", kernels, "_attend", launched(contiguous_queries)),
    Fault("rows contiguous", "mla_decode", kernels, "_attend", launched(STRIDE=12)),
    Fault("channels contiguous", "mla_decode", entry, "_row_major", rows_are_columns),
]


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.name)
def test_a_fault_is_found(fault, monkeypatch):
    assert red(fault.op, fault.case) == []
    plant(fault, monkeypatch)
    assert red(fault.op, fault.case) != []


@pytest.mark.parametrize("case", ["odd_plain", "many_heads", "rising_scores"])
def test_tiles_of_whole_rows_are_right(case, monkeypatch):
    """The tile of bf16, which the interpreter cannot multiply, for fp32."""
    monkeypatch.setattr(kernels, "FP32_TILE", kernels.TILE._replace(tokens=16))
    assert red("mla_decode", case) == []
    monkeypatch.setattr(kernels, "_attend", launched(R=1)(kernels._attend))
    assert red("mla_decode", case) != []


@given(st.integers(1, 1 << 22), st.integers(1, 200), st.integers(1, 264))
def test_parts_cover_the_context_within_one_go(tokens, head_tiles, programs):
    parts = kernels.parts_of(tokens, kernels.TILE, head_tiles, programs)
    assert (parts.number - 1) * parts.length < tokens <= parts.number * parts.length
    assert parts.length % kernels.TILE.tokens == 0
    assert parts.number * head_tiles <= max(programs, head_tiles)


def test_a_gradient_is_the_references(monkeypatch):
    monkeypatch.setattr(entry, "attend", None)
    q_HC = torch.randn(2, 12, requires_grad=True)
    entry.mla_decode(q_HC, torch.randn(5, 12), 8, 0.3).sum().backward()
    assert q_HC.grad is not None


@pytest.mark.parametrize(("rank", "width"), [(0, 12), (12, 12), (513, 576), (16, 81)])
def test_rows_that_do_not_fit_are_not_served(rank, width):
    assert not entry.serves(torch.ones(2, width), torch.ones(5, width), rank)


def test_rows_of_another_dtype_are_not_served():
    q_HC, latent_SC = torch.ones(2, 576), torch.ones(5, 576)
    assert entry.serves(q_HC, latent_SC, 512)
    assert not entry.serves(q_HC, latent_SC.bfloat16(), 512)
    assert not entry.serves(q_HC.half(), latent_SC.half(), 512)
