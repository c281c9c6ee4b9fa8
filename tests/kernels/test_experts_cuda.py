"""The experts' products in CUDA C++ as far as a CPU can tell: what they serve, how they are run."""

from __future__ import annotations

from typing import NamedTuple

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from perilune.kernels.common import nvrtc
from perilune.kernels.experts import cuda_products, shared_out, triton_mxfp4, triton_products
from perilune.kernels.experts.cuda_products import FEW, MANY, Tile, Work
from perilune.kernels.experts.triton_schedule import SLACK, Plan

GPU = torch.device("cuda", 0)


def rows(tokens=9, width=64, before=0, behind=0, dtype=torch.bfloat16):
    """A view of wider rows, `before` numbers behind their beginning."""
    buffer = torch.zeros(tokens, before + width + behind, dtype=dtype)
    assert buffer.data_ptr() % cuda_products.ALIGNMENT == 0
    return buffer[:, before : before + width]


@pytest.fixture
def on_hopper(monkeypatch):
    monkeypatch.setattr(cuda_products, "is_available", lambda device: True)


@pytest.mark.usefixtures("on_hopper")
@pytest.mark.parametrize(
    ("x_TL", "served"),
    [
        (rows(), True),
        (rows(width=72), True),
        (rows(before=8, behind=16), True),
        (rows(width=76), False),
        (rows(behind=4), False),
        (rows(before=4, behind=4), False),
        (rows(dtype=torch.float16), False),
        (rows(dtype=torch.float32), False),
    ],
    ids=["plain", "eights", "view", "width", "stride", "address", "fp16", "fp32"],
)
def test_rows_in_pieces_of_16_bytes_are_served(x_TL, served):
    assert cuda_products.serves(x_TL, wide=False) == served
    assert not cuda_products.serves(x_TL, wide=True)


def test_a_cpu_is_not_served():
    assert not cuda_products.serves(rows(), wide=False)


@pytest.mark.parametrize(
    ("capability", "library", "nvidia", "available"),
    [
        ((9, 0), True, "13.0", True),
        ((9, 0), False, "13.0", False),
        ((8, 0), True, "13.0", False),
        ((10, 0), True, "13.0", False),
        ((9, 4), True, None, False),
    ],
    ids=["Hopper", "no compiler", "before Hopper", "after Hopper", "not NVIDIA's"],
)
def test_hopper_with_its_compiler_is_available(
    capability, library, nvidia, available, monkeypatch, caplog
):
    monkeypatch.setattr(torch.version, "cuda", nvidia)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    monkeypatch.setattr(nvrtc, "is_installed", lambda: library)
    assert cuda_products.is_available.__wrapped__(GPU) == available
    assert bool(caplog.records) == (not library)


class Called(NamedTuple):
    by: str
    tile: tuple
    y: torch.Tensor


@pytest.fixture
def called(monkeypatch):
    """By whom both products of a call would be started, which are not."""
    found = []
    for module in (cuda_products, triton_products):
        name = module.__name__.rpartition(".")[2]
        monkeypatch.setattr(
            module, "_launch", lambda *given, name=name: found.append(Called(name, *given[-2:]))
        )
    monkeypatch.setattr(
        triton_mxfp4, "combine", lambda out_PL, place_TR, weight_TR, dtype: out_PL.to(dtype)
    )
    return found


def started(called, inputs, **changes):
    """The module and the tile of both products."""
    called.clear()
    with torch.no_grad():
        triton_mxfp4.experts_mxfp4(**inputs | changes)
    (first, second) = called
    assert first[:2] == second[:2]
    return first[:2]


def inputs_of(counts, **sizes):
    inputs = shared_out(torch.Generator().manual_seed(1), torch.bfloat16, counts, **sizes)
    return inputs | {"x_TL": inputs["x_TL"].detach()}


@pytest.mark.usefixtures("on_hopper")
def test_hopper_runs_its_own_programs_for_experts_with_few_and_many_tokens(called):
    assert started(called, inputs_of((5, 11))) == ("cuda_products", FEW)
    assert started(called, inputs_of((40, 45))) == ("cuda_products", MANY)
    first, second = called
    assert (first.y.shape, first.y.dtype) == ((87, 64), torch.bfloat16)
    assert (second.y.shape, second.y.dtype) == ((87, 32), torch.float32)


@pytest.mark.usefixtures("on_hopper")
def test_triton_runs_the_others(called):
    inputs = inputs_of((5, 11))
    wide_rows = inputs["x_TL"].repeat(1, 2)
    for changes in (
        {"wide": True},
        {"x_TL": inputs["x_TL"].float()},
        {"x_TL": torch.cat([wide_rows, wide_rows], 1)[:, 4:36]},
    ):
        module, tile = started(called, inputs, **changes)
        assert module == "triton_products"
        assert isinstance(tile, triton_products.Tile)
    # A row of which only the numbers are apart is copied first.
    apart = torch.stack([inputs["x_TL"]] * 2, 2)[..., 0]
    assert started(called, inputs, x_TL=apart) == ("cuda_products", FEW)


@pytest.mark.usefixtures("on_hopper")
def test_triton_runs_pairs_that_have_a_tile_each(called):
    alone, ordered = inputs_of((2,) + 15 * (0,)), inputs_of((3,) + 15 * (0,))
    assert alone["expert_TR"].numel() == 4
    assert started(called, alone)[0] == "triton_products"
    assert started(called, ordered) == ("cuda_products", FEW)


def test_other_devices_run_triton_s(called):
    assert started(called, inputs_of((5, 11)))[0] == "triton_products"


@pytest.mark.usefixtures("on_hopper")
def test_the_reference_has_the_gradients(called):
    inputs = inputs_of((5, 11))
    y_TL = triton_mxfp4.experts_mxfp4(**inputs | {"x_TL": inputs["x_TL"].requires_grad_()})
    assert y_TL.requires_grad
    assert not called


@pytest.mark.parametrize(
    ("tokens", "tile"),
    [(1, FEW), (32, FEW), (128, FEW), (256, FEW), (1024, FEW), (2048, MANY), (4096, MANY)],
)
def test_tiles_of_k3(tokens, tile):
    assert cuda_products.tile_for(16 * tokens, 896, torch.bfloat16) == tile
    assert cuda_products.tile_for(2 * tokens, 112, torch.bfloat16) == tile


@given(st.integers(1, 2**17), st.integers(1, 1000))
def test_few_are_enough_for_most_experts(pairs, num_experts):
    tile = cuda_products.tile_for(pairs, num_experts, torch.bfloat16)
    if tile == FEW:
        assert tile.tokens * num_experts >= SLACK * pairs
    else:
        in_use = min(pairs, num_experts)
        assert FEW.tokens * 0.63 * in_use < SLACK * pairs


class Launched(NamedTuple):
    kernel: tuple
    programs: int
    work: Work
    early: bool


@pytest.fixture
def launched(monkeypatch):
    """Everything that would be launched."""
    found = []

    def launch(kernel, programs, arguments, *, early=False):
        (work,) = arguments
        found.append(Launched(kernel, programs, work, early))

    monkeypatch.setattr(cuda_products, "launch", launch)
    monkeypatch.setattr(cuda_products, "kernel_of", lambda *given: given)
    return found


def tiles(row_tiles, column_tiles, experts=2):
    return torch.zeros(experts, row_tiles, column_tiles, 1088, dtype=torch.int32)


@pytest.mark.parametrize(
    ("threads", "of_a_group", "row_tiles", "programs"),
    [(128, 2, 10, 5), (256, 1, 10, 5), (256, 1, 7, 4), (256, 2, 10, 3), (384, 1, 10, 4)],
)
def test_the_last_program_may_have_fewer_rows(threads, of_a_group, row_tiles, programs, launched):
    tile = Tile(32, 8, threads, of_a_group, 1)
    tile_I3 = torch.zeros(3, 3, dtype=torch.int32)
    cuda_products.down(rows(), tile_I3, tiles(row_tiles, 1), False, 600, tile)
    assert launched[0].programs == 3 * programs


@pytest.mark.parametrize(
    ("caps", "told"),
    [((4.0, 25.0), [4.0, 25.0]), ((None, None), [0.0, 0.0]), ((1.5, None), [1.5, 0.0])],
)
def test_gate_and_up_are_launched_with_what_the_source_takes(caps, told, launched):
    x_TL, w13_EMKW = rows(tokens=9, width=72, before=8, behind=16), tiles(6, 1)
    tile_I3, pair_P = torch.zeros(5, 3, dtype=torch.int32), torch.zeros(18, dtype=torch.int32)
    plan = Plan(tile_I3, pair_P, torch.zeros(9, 2, dtype=torch.int32))
    hidden_PI = cuda_products.gate_up(x_TL, plan, w13_EMKW, False, caps, MANY)
    assert (hidden_PI.shape, hidden_PI.dtype) == ((18, 192), torch.bfloat16)
    (one,) = launched
    assert one.kernel == ("gate_up", MANY, x_TL.device)
    assert (one.programs, one.early) == (3 * 5, True)
    work = {name: getattr(one.work, name) for name, _ in Work._fields_}
    pointers = {"x": x_TL, "pair": pair_P, "tile": tile_I3, "w": w13_EMKW, "y": hidden_PI}
    assert {name: work.pop(name) for name in pointers} == {
        name: tensor.data_ptr() for name, tensor in pointers.items()
    }
    assert [work.pop("beta"), work.pop("linear_beta")] == told
    assert work == {
        "x_bytes": 96 * 2,
        "active": 2,
        "width_bytes": 72 * 2,
        "out": 192,
        "column_tiles": 1,
        "row_tiles": 6,
    }


def test_down_takes_places_as_they_come(launched):
    hidden_PI, w2_EMKW = rows(tokens=18, width=192), tiles(2, 2)
    tile_I3 = torch.zeros(5, 3, dtype=torch.int32)
    out_PL = cuda_products.down(hidden_PI, tile_I3, w2_EMKW, False, 72, FEW)
    assert (out_PL.shape, out_PL.dtype) == ((18, 72), torch.float32)
    (one,) = launched
    assert one.kernel[:2] == ("down", FEW)
    assert (one.programs, one.early) == (5, True)
    assert (one.work.pair, one.work.active) == (None, 1)
    assert (one.work.width_bytes, one.work.out, one.work.column_tiles) == (192 * 2, 72, 2)
    assert (one.work.beta, one.work.linear_beta) == (0.0, 0.0)
