"""Faults planted in Triton's decode: each turns a check red."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from triton_faults import Fault, plant, red

from perilune.kernels.mla import triton as entry
from perilune.kernels.mla import triton_decode, triton_decode_plain

ATTEND = (
    *("q", "c", "r", "rate", "table", "length", "begin", "partial", "lse"),
    *("sequences", "capacity", "teams", "q_n_stride", "q_q_stride", "q_h_stride"),
    *("c_page_stride", "r_page_stride", "rate_page_stride", "rate_stride", "table_stride"),
    "scale",
)
MERGE = ("partial", "lse", "begin", "o", "sequences", "teams")


class Launch:
    """A kernel that is started with other arguments."""

    def __init__(self, run: Any, names: tuple[str, ...], changes: Any, meta: Any) -> None:
        self.run, self.names, self.changes, self.meta = run, names, changes, meta

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., Any]:
        def launch(*x: Any, **meta: Any) -> Any:
            given = dict(zip(self.names, x, strict=True))
            given |= {name: change(given[name]) for name, change in self.changes.items()}
            return self.run[grid](*given.values(), **meta | self.meta)

        return launch


def attend(meta: dict[str, Any] | None = None, **changes: Any) -> Callable[[Any], Any]:
    return lambda run: Launch(run, ATTEND, changes, meta or {})


def merge(meta: dict[str, Any] | None = None, **changes: Any) -> Callable[[Any], Any]:
    return lambda run: Launch(run, MERGE, changes, meta or {})


def by(amount: float) -> Callable[[Any], Any]:
    return lambda x: x + amount


def times(factor: float) -> Callable[[Any], Any]:
    return lambda x: x * factor


def rows_are_columns(run):
    return lambda x: x if x.is_contiguous() else x.as_strided(x.shape, (*x.stride()[:-1], 1))


def planted(name: str, attr: str, wrong: Callable[[Any], Any], case: str = "") -> Fault:
    owner = triton_decode if attr == "merge" else triton_decode_plain
    return Fault(name, "mla_decode", owner, attr, wrong, case)


FAULTS = [
    planted("equal weights", "merge", merge(lse=torch.zeros_like), "rising_scores"),
    planted("all but one part unmerged", "merge", merge(teams=lambda x: 1), "rising_scores"),
    planted("natural base", "_attend", attend(scale=times(0.6931)), "odd_plain"),
    planted("last token lost", "_attend", attend(length=by(-1)), "page_ends_plain"),
    planted("a token too many", "_attend", attend(length=by(1)), "odd_plain"),
    planted("first page for all", "_attend", attend({"PAGE": 0}), "odd_plain"),
    planted("tiles lie in pages", "_attend", attend({"PAGE": 16}), "odd_pages"),
    planted("no end of pages", "_attend", attend(capacity=lambda x: x // 2), "odd_plain"),
    planted("all queries see all", "_attend", attend({"Q": 1, "H": 24}), "many_queries"),
    planted("rates forgotten", "_attend", attend(rate=torch.ones_like), "rounded"),
    planted("one table for all", "_attend", attend(table_stride=times(0)), "odd_pages"),
    planted("one query for all", "_attend", attend(q_n_stride=times(0)), "many_heads"),
    planted("queries contiguous", "_attend", attend(q_h_stride=lambda x: 12)),
    planted("rows contiguous", "_attend", attend({"C_STRIDE": 12})),
    planted("pages contiguous", "_attend", attend(c_page_stride=lambda x: 12 * 16)),
    Fault("channels contiguous", "mla_decode", entry, "row_major", rows_are_columns),
]


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.name)
def test_a_fault_is_found(fault, monkeypatch):
    plant(fault, monkeypatch)
    assert red(fault.op, fault.case) != []


@pytest.mark.parametrize("case", sorted({fault.case for fault in FAULTS if fault.case}))
def test_without_one_nothing_is(case):
    assert red("mla_decode", case) == []


def test_a_gradient_is_the_references(monkeypatch):
    monkeypatch.setattr(entry, "attend", None)
    q_NQHC = torch.randn(1, 1, 2, 12, requires_grad=True)
    table, length = torch.zeros(1, 1, dtype=torch.int32), torch.tensor([5])
    entry.mla_decode(q_NQHC, torch.randn(1, 5, 12), table, length, 8, 0.3).sum().backward()
    assert q_NQHC.grad is not None


@pytest.mark.parametrize(("rank", "width"), [(0, 12), (12, 12), (513, 576), (16, 81)])
def test_rows_that_do_not_fit_are_not_served(rank, width):
    assert not entry.serves(torch.ones(1, 1, 2, width), torch.ones(1, 5, width), rank)


def test_rows_of_another_dtype_are_not_served():
    q_NQHC, latent_PSC = torch.ones(1, 1, 2, 576), torch.ones(1, 5, 576)
    assert entry.serves(q_NQHC, latent_PSC, 512)
    assert not entry.serves(q_NQHC, latent_PSC.bfloat16(), 512)
    assert not entry.serves(q_NQHC.half(), latent_PSC.half(), 512)
    rounded = latent_PSC[..., :512].to(torch.float8_e4m3fn), 512, latent_PSC[..., 512:]
    assert entry.serves(q_NQHC, *rounded, torch.ones(1, 5))
    assert not entry.serves(q_NQHC, *rounded, None)
