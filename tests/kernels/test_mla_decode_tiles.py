"""Tiles and programs of MLA decode for bf16, in fp32: the interpreter cannot multiply bf16."""

from __future__ import annotations

import warnings

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from perilune.kernels.common.cases import normal
from perilune.kernels.mla import oracle, triton_decode
from perilune.kernels.mla.paged import paged, rounded
from perilune.kernels.mla.triton_decode import attend, launches_of
from perilune.kernels.mla.triton_decode_plan import MAX_NARROW, plan_of
from perilune.kernels.mla.triton_decode_rows import Rows
from perilune.kernels.testing import relative_error

RANK = SHARED = 16


def inputs(lengths, queries, heads, page=64, seed=0):
    draw = torch.Generator().manual_seed(seed)
    rows_RC = normal(draw, torch.float32, sum(lengths), RANK + SHARED).detach()
    q_NQHC = normal(draw, torch.float32, len(lengths), queries, heads, RANK + SHARED).detach()
    return {"q_NQHC": q_NQHC, **paged(draw, rows_RC, lengths, page)}


def error(x, plan, *, tma):
    latent_PSC = x["latent_PSC"]
    shared_PSR = x.get("shared_PSR", latent_PSC[..., RANK:])
    rows = Rows(latent_PSC[..., :RANK], shared_PSR, x.get("rate_PS"), x["table_NW"], x["length_N"])
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)
        got = attend(x["q_NQHC"], rows, 0.3, plan, tma)
    wide = {n: v.double() if v.is_floating_point() else v for n, v in x.items()}
    return relative_error(got, oracle.mla_decode(**wide, kv_lora_rank=RANK, scale=0.3))


def plan(x, programs, **chosen):
    _, queries, heads, _ = x["q_NQHC"].shape
    return plan_of(queries * heads, torch.bfloat16, programs, **chosen)


@pytest.mark.parametrize("tma", [False, True])
@pytest.mark.parametrize(
    ("lengths", "queries", "heads", "page", "members", "programs"),
    [
        ((130, 70), 1, 70, 64, (1, 1), 4),
        ((130, 0, 64, 65), 1, 20, 128, None, 3),
        ((140, 3), 2, 40, 256, (3, 2), 5),
        ((65, 64), 3, 26, 64, None, 3),
    ],
)
def test_wide_and_narrow_tiles_are_right(lengths, queries, heads, page, members, programs, tma):
    x = inputs(lengths, queries, heads, page)
    assert error(x, plan(x, programs, members=members), tma=tma) < 1e-6


def test_pages_that_tiles_cross_are_right():
    x = inputs((110,), 1, 70, page=50)
    assert error(x, plan(x, 4), tma=False) < 1e-6


def test_wide_tiles_alone_and_rounded_latents_are_right():
    x = inputs((100, 30), 1, 70)
    x |= rounded(x["latent_PSC"], RANK)
    assert error(x, plan(x, 4, narrow=False), tma=False) < 1e-6


def test_latents_in_fp8_are_off_by_their_rounding_alone():
    """e4m3 keeps three bits behind the leading one: 2^-4 at most, a third of it on average."""
    x = inputs((300,), 1, 4)
    rough = x | rounded(x["latent_PSC"], RANK)
    given = {"kv_lora_rank": RANK, "scale": 0.05}
    exact, got = oracle.mla_decode(**x, **given), oracle.mla_decode(**rough, **given)
    assert 1e-3 < relative_error(got, exact) < 4e-2


@given(st.integers(1, 800), st.integers(1, 200), st.booleans())
def test_a_plan_has_every_row_once_and_fits(rows, programs, narrow):
    found = plan_of(rows, torch.bfloat16, programs, narrow)
    assert found.wide_rows + found.narrow_rows == rows
    assert found.narrow_rows <= min(MAX_NARROW, found.narrow_block)
    assert found.narrow_rows == 0 or found.wide_rows % found.wide_block == 0
    least = found.wide_tiles + (found.narrow_rows > 0)
    if programs >= least:
        assert found.wide_programs + found.narrow_programs <= programs


@given(
    st.lists(st.integers(0, 40), min_size=1, max_size=12),
    st.integers(1, 9),
    st.integers(1, 3),
)
def test_no_two_parts_share_a_number(tiles, teams, members):
    """What `triton_decode_share` says of its numbers, and the room that `attend` makes."""
    quota, taken, begin = -(-sum(tiles) // teams), [], 0
    for n, count in enumerate(tiles):
        for team in range(teams):
            if max(begin, team * quota) < min(begin + count, (team + 1) * quota):
                taken += [(team + n) * members + member for member in range(members)]
        begin += count
    assert len(set(taken)) == len(taken)
    assert all(0 <= part < (teams + len(tiles)) * members for part in taken)


def test_roles_take_whole_rows_of_k3_alone(monkeypatch):
    def launches(pool_PSC, *, tma=True):
        table, length = torch.zeros(1, 1, dtype=torch.int32), torch.ones(1, dtype=torch.int32)
        rows = Rows(pool_PSC[..., :512], pool_PSC[..., 512:], None, table, length)
        return {launch.__module__.rpartition(".")[2] for launch in launches_of(rows, tma)}

    pool_PSC = torch.zeros(1, 64, 576, dtype=torch.bfloat16)
    assert launches(pool_PSC) == {"triton_decode_programs"}
    monkeypatch.setattr(triton_decode, "PREFERS_ROLES", True)
    assert launches(pool_PSC) == {"triton_decode_roles_wide", "triton_decode_roles_narrow"}
    assert launches(pool_PSC, tma=False) == {"triton_decode_programs"}
    assert launches(pool_PSC.float()) == {"triton_decode_programs"}
    assert launches(pool_PSC[..., :560]) == {"triton_decode_programs"}


def test_96_heads_are_not_padded():
    assert plan_of(96, torch.bfloat16, 132)[:4] == (64, 64, 32, 32)
    assert plan_of(192, torch.bfloat16, 132).narrow_rows == 0
