"""KDA cut into pieces: states at cuts, and long sequences whose pieces run side by side."""

from __future__ import annotations

import pytest
import torch

from perilune.kernels.common.packing import Packing
from perilune.kernels.kda import oracle, triton, triton_split
from perilune.kernels.kda.reference import kda_chunk as reference_chunk
from perilune.kernels.kda.triton_split import segment_length

# The interpreter is numpy, which warns of infinities that a kernel masks afterwards.
pytestmark = pytest.mark.filterwarnings("ignore:.*encountered in:RuntimeWarning")

HEADS, K, V = 2, 16, 32


def inputs(lengths, with_state=True):
    generator = torch.Generator().manual_seed(3)

    def drawn(*shape, scale=1.0):
        return scale * torch.randn(*shape, generator=generator)

    t = sum(lengths)
    # So weak a decay that every piece still feels the first one.
    z = drawn(t, HEADS, K) - 6
    rows = drawn(t, HEADS, K), drawn(t, HEADS, K), drawn(t, HEADS, V), z
    gate = drawn(t, HEADS), drawn(HEADS, scale=0.5), drawn(HEADS, K, scale=0.3)
    state = drawn(len(lengths), HEADS, K, V) if with_state else None
    return *rows, *gate, Packing.of(lengths), -5.0, state


def wide(arguments):
    return [x.double() if isinstance(x, torch.Tensor) else x for x in arguments]


def apart(got, want):
    return float((got.double() - want).norm() / want.norm())


@pytest.fixture
def short_pieces(monkeypatch):
    """Sequences of a few chunks are long, and the card wants many pieces."""
    monkeypatch.setattr(triton_split, "SHORTEST", 32)
    monkeypatch.setattr(triton_split, "PROGRAMS", 64)


@pytest.mark.parametrize("with_state", [True, False])
@pytest.mark.parametrize(
    ("lengths", "cuts"),
    [((150,), None), ((150, 70), ((40, 64, 150), (1,))), ((32, 100), ((), (100,)))],
)
def test_pieces_side_by_side(short_pieces, lengths, cuts, with_state):
    given = inputs(lengths, with_state)
    assert segment_length(given[7], HEADS, V) is not None
    got = triton.kda_chunk(*given, cuts)
    want = oracle.kda_recurrent(*wide(given), cuts)
    assert apart(got.o_THV, want.o_THV) < 2e-6
    assert apart(got.state_NHKV, want.state_NHKV) < 2e-6
    assert cuts is None or apart(got.cut_EHKV, want.cut_EHKV) < 2e-6


def gradients(op, arguments):
    """Of outputs and states alike."""
    leaves = [x.detach().requires_grad_() if isinstance(x, torch.Tensor) else x for x in arguments]
    out = op(*leaves)
    loss = (out.o_THV * arguments[2]).sum() + out.state_NHKV.square().sum()
    return torch.autograd.grad(loss, [x for x in leaves if isinstance(x, torch.Tensor)])


def test_gradients_of_pieces_side_by_side(short_pieces):
    given = inputs((100,))
    got, want = gradients(triton.kda_chunk, given), gradients(reference_chunk, wide(given))
    assert max(map(apart, got, want)) < 2e-5


def test_what_fills_the_card_by_itself_stays_whole():
    assert segment_length(Packing.of((65536,)), 96, 128) is None
    assert segment_length(Packing.of((8192,) * 8), 12, 128) is None
    assert segment_length(Packing.of((900,)), 4, 128) is None
    assert segment_length(Packing.of((65536,)), 4, 128) == 4096


@pytest.mark.parametrize("op", [triton.kda_chunk, reference_chunk, oracle.kda_recurrent])
def test_states_at_cuts_have_no_gradient(op):
    given = list(inputs((40,)))
    given[2] = given[2].requires_grad_()
    out = op(*given, [[8, 40]])
    assert not out.cut_EHKV.requires_grad
    assert torch.equal(out.cut_EHKV[1], out.state_NHKV[0])


@pytest.mark.parametrize("op", [triton.kda_chunk, reference_chunk])
@pytest.mark.parametrize(
    ("cuts", "said"),
    [
        (((5,), (5,)), "2 sequences of cuts for 1"),
        (((0,),), r"cuts \(0,\) do not rise from 1"),
        (((7, 7),), r"cuts \(7, 7\) do not rise"),
        (((41,),), "the sequence's 40 tokens"),
    ],
)
def test_wrong_cuts_are_named(op, cuts, said):
    with pytest.raises(ValueError, match=said):
        op(*inputs((40,)), cuts)


def test_rows_of_documents_have_no_cuts():
    given = list(inputs((40,)))
    given[7], given[9] = Packing.rows(torch.zeros(1, 40, dtype=torch.int64)), None
    with pytest.raises(ValueError, match="several documents"):
        triton.kda_chunk(*given, ((5,),))
