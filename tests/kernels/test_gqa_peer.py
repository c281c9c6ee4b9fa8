"""Grouped-query decoding, the yardstick's: the kernel in Triton, torch's ways, and the choice."""

from __future__ import annotations

import pytest
import torch
from torch.nn.attention import SDPBackend

from perilune.kernels.bench import triton_gqa
from perilune.kernels.bench.errors import DishonestError
from perilune.kernels.bench.gqa_paths import fastest, grouped_heads, grouped_rows, paths
from perilune.kernels.bench.stopwatch import CpuStopwatch
from perilune.kernels.bench.triton_gqa import Tile, attend
from perilune.kernels.testing import relative_error
from perilune.kernels.testing.memory import NewMemory

CPU = torch.device("cpu")


def drawn(n, groups, each, length, width):
    generator = torch.Generator().manual_seed(length)
    q_NHD = torch.randn(n, groups * each, width, generator=generator)
    k_NGLD, v_NGLD = torch.randn(2, n, groups, length, width, generator=generator)
    return q_NHD, k_NGLD, v_NGLD


def truth(q_NHD, k_NGLD, v_NGLD):
    """Every query head beside keys and values of its own."""
    q, k, v = (x.double() for x in (q_NHD, k_NGLD, v_NGLD))
    each = q.shape[1] // k.shape[1]
    k, v = (x.repeat_interleave(each, 1) for x in (k, v))
    scores = torch.einsum("nhd,nhld->nhl", q, k) * q.shape[2] ** -0.5
    return torch.einsum("nhl,nhld->nhd", scores.softmax(-1), v)


@pytest.mark.parametrize(
    ("sizes", "programs"),
    [((2, 2, 12, 200, 32), 16), ((1, 1, 3, 33, 16), 4), ((1, 2, 12, 5, 16), 64)],
)
def test_triton_s_kernel(monkeypatch, sizes, programs):
    """Contexts that end inside of a tile and of a split, fewer heads than a tile has rows."""
    monkeypatch.setattr(triton_gqa, "PROGRAMS", programs)
    inputs = drawn(*sizes)
    with NewMemory(poisoned=True):
        o_NHD = attend(*inputs, tile=Tile(16, 4, 1))
    assert relative_error(o_NHD, truth(*inputs)) < 1e-5


@pytest.mark.parametrize("way", [grouped_rows, grouped_heads])
def test_torch_s_ways(way):
    inputs = drawn(2, 2, 12, 70, 32)
    assert relative_error(way(*inputs, backend=SDPBackend.MATH), truth(*inputs)) < 1e-5


def test_the_fastest_right_one_is_chosen():
    q_NHD, *cache = drawn(2, 2, 4, 70, 32)
    right = paths(CPU)["torch SDPA"]

    def slow(*args):
        for _ in range(300):
            right(*args)
        return right(*args)

    def wrong(*args):
        return 1.1 * right(*args)

    def broken(*args):
        raise RuntimeError("no kernel\nof this kind")

    ways = {"wrong": wrong, "slow": slow, "right": right, "broken": broken}
    chosen = fastest(ways, q_NHD, [cache, cache], CpuStopwatch())
    assert (chosen.name, chosen.attend) == ("right", right)
    assert chosen.tried["slow"] > chosen.tried["right"] > 0
    assert chosen.tried["wrong"] == "wrong is 1.0e-01 from the truth"
    assert chosen.tried["broken"] == "no kernel"


def test_none_is_right():
    q_NHD, *cache = drawn(1, 2, 4, 70, 32)
    with pytest.raises(DishonestError, match="no way to decode"):
        fastest({"zeros": lambda q, k, v: torch.zeros_like(q)}, q_NHD, [cache], CpuStopwatch())
