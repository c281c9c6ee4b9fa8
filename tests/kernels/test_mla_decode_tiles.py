"""Tiles and programs of MLA decode for bf16, in fp32: the interpreter cannot multiply bf16."""

from __future__ import annotations

import warnings

import pytest
import torch
import triton
from hypothesis import given
from hypothesis import strategies as st

from perilune.kernels.common.cases import normal
from perilune.kernels.mla import oracle, triton_decode, triton_decode_roles
from perilune.kernels.mla.paged import paged, rounded
from perilune.kernels.mla.triton_decode import attend, launch_of
from perilune.kernels.mla.triton_decode_plain import launch as plain_launch
from perilune.kernels.mla.triton_decode_plan import plan_of
from perilune.kernels.mla.triton_decode_rows import Rows
from perilune.kernels.testing import relative_error

RANK = SHARED = 16


def inputs(lengths, queries, heads, page=64, seed=0):
    draw = torch.Generator().manual_seed(seed)
    rows_RC = normal(draw, torch.float32, sum(lengths), RANK + SHARED).detach()
    q_NQHC = normal(draw, torch.float32, len(lengths), queries, heads, RANK + SHARED).detach()
    return {"q_NQHC": q_NQHC, **paged(draw, rows_RC, lengths, page)}


def error(x, programs):
    """With the tiles that bf16 takes."""
    _, queries, heads, _ = x["q_NQHC"].shape
    plan, latent_PSC = plan_of(queries * heads, torch.bfloat16, programs), x["latent_PSC"]
    shared_PSR = x.get("shared_PSR", latent_PSC[..., RANK:])
    rows = Rows(latent_PSC[..., :RANK], shared_PSR, x.get("rate_PS"), x["table_NW"], x["length_N"])
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)
        got = attend(x["q_NQHC"], rows, 0.3, plan)
    wide = {n: v.double() if v.is_floating_point() else v for n, v in x.items()}
    return relative_error(got, oracle.mla_decode(**wide, kv_lora_rank=RANK, scale=0.3))


@pytest.mark.parametrize(
    ("lengths", "queries", "heads", "page", "programs"),
    [
        ((130, 70), 1, 70, 64, 4),
        ((130, 0, 64, 65), 1, 20, 128, 3),
        ((140, 3), 2, 40, 256, 5),
        ((65, 64), 3, 26, 64, 3),
        ((110,), 1, 70, 50, 4),
    ],
)
def test_tiles_are_right(lengths, queries, heads, page, programs):
    assert error(inputs(lengths, queries, heads, page), programs) < 1e-6


def test_a_hole_in_a_table_is_right():
    x = inputs((200, 70), 1, 20)
    x["table_NW"][0, 1] = -1
    assert error(x, 3) < 1e-6


def test_rounded_latents_are_right():
    x = inputs((100, 30), 1, 70)
    assert error(x | rounded(x["latent_PSC"], RANK), 4) < 1e-6


def test_latents_in_fp8_are_off_by_their_rounding_alone():
    """e4m3 keeps three bits behind the leading one: 2^-4 at most, a third of it on average."""
    x = inputs((300,), 1, 4)
    rough = x | rounded(x["latent_PSC"], RANK)
    given = {"kv_lora_rank": RANK, "scale": 0.05}
    exact, got = oracle.mla_decode(**x, **given), oracle.mla_decode(**rough, **given)
    assert 1e-3 < relative_error(got, exact) < 4e-2


@given(st.integers(1, 800), st.integers(1, 200))
def test_a_plan_has_every_row_once_and_fits(rows, programs):
    found = plan_of(rows, torch.bfloat16, programs)
    tiles = -(-rows // found.block)
    assert found.programs == found.teams * tiles <= max(programs, tiles)


@given(st.lists(st.integers(0, 40), min_size=1, max_size=12), st.integers(1, 9))
def test_no_two_parts_share_a_number(tiles, teams):
    """What `triton_decode_share` says of its numbers, and the room that `attend` makes."""
    quota, taken, begin = -(-sum(tiles) // teams), [], 0
    for n, count in enumerate(tiles):
        for team in range(teams):
            if max(begin, team * quota) < min(begin + count, (team + 1) * quota):
                taken.append(team + n)
        begin += count
    assert len(set(taken)) == len(taken)
    assert all(0 <= part < teams + len(tiles) for part in taken)


def pool(pages=3, page=64, width=576, dtype=torch.bfloat16):
    return torch.zeros(pages, page, width, dtype=dtype)


def cached(pool_PSC, rank=512, width=2):
    table, length = torch.zeros(1, width, dtype=torch.int32), torch.ones(1, dtype=torch.int32)
    return Rows(pool_PSC[..., :rank], pool_PSC[..., rank:], None, table, length)


@pytest.mark.parametrize(
    ("rows", "fit"),
    [
        (cached(pool()), True),
        (cached(pool(page=128)), True),
        (cached(pool(page=50), width=1), True),
        (cached(pool(width=592)[..., 8:584]), True),
        (cached(pool(page=50)), False),
        (cached(pool(dtype=torch.float32)), False),
        (cached(pool(width=560)), False),
        (cached(pool(), rank=480), False),
        (cached(pool(width=577)[..., 1:]), False),
        (cached(pool(page=128)[:, :64]), False),
        (cached(pool())._replace(r_PSR=pool()[..., 512:]), False),
        (cached(pool())._replace(rate_PS=torch.ones(3, 64)), False),
    ],
)
def test_what_comes_in_boxes(rows, fit):
    assert rows.come_in_boxes == fit


def test_roles_serve_what_comes_in_boxes_on_hopper_alone(monkeypatch):
    class OnGpu:
        device = torch.device("cuda", 0)

        def __init__(self, address):
            self.data_ptr = lambda: address

    rows, others = cached(pool()), cached(pool().float())
    assert launch_of(torch.zeros(1), rows) is plain_launch
    monkeypatch.setattr(triton_decode, "has_roles", lambda device: True)
    assert launch_of(torch.zeros(1), rows) is plain_launch
    assert launch_of(OnGpu(64), rows) is triton_decode_roles.launch
    assert launch_of(OnGpu(66), rows) is plain_launch
    assert launch_of(OnGpu(64), others) is plain_launch
    monkeypatch.setattr(triton_decode, "has_roles", lambda device: False)
    assert launch_of(OnGpu(64), rows) is plain_launch


@pytest.mark.parametrize(
    ("version", "capability", "run"),
    [("3.6.0", (9, 0), True), ("3.9.0", (9, 0), False), ("3.6.0", (10, 0), False)],
)
def test_roles_want_hopper_and_their_gluon(version, capability, run, monkeypatch):
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(triton, "__version__", version)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    triton_decode.has_roles.cache_clear()
    assert triton_decode.has_roles(torch.device("cuda", 0)) == run
    triton_decode.has_roles.cache_clear()


def test_96_heads_are_two_tiles():
    assert plan_of(96, torch.bfloat16, 132).programs == 2 * plan_of(96, torch.bfloat16, 132).teams
    assert plan_of(192, torch.bfloat16, 132).teams == 44
