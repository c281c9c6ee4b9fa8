"""Documents packed together are computed as if each were alone: values and gradients, no leak."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from perilune.kernels.common.packing import Packing
from perilune.model.init import random_weights
from perilune.model.model import Transformer
from perilune.model.parse_config import parse_config
from perilune.model.presets import tiny_k3, tiny_kimi_linear

CLOSE = 1e-4
"""Of the largest logit: products of other shapes sum in another order, and Attention Residuals of
tiny models amplify rounding. A leak shows at 1e-2 and more (see the last test of leaks)."""
LENGTHS = (33, 1, 2, 64, 5)
FAMILIES = {"k3": tiny_k3, "kimi_linear": tiny_kimi_linear}


def make_model(family: str, **options: Any) -> Transformer:
    raw = FAMILIES[family](hidden_size=40, **options)
    return random_weights(Transformer(parse_config(raw)), torch.Generator().manual_seed(2))


MODELS = {family: make_model(family).requires_grad_(False) for family in FAMILIES}


@pytest.fixture(params=FAMILIES)
def model(request) -> Transformer:
    return MODELS[request.param]


def draw_ids(lengths: Sequence[int], seed: int = 0) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randint(0, 128, (n,), generator=generator) for n in lengths]


def alone(model: Transformer, documents: Sequence[Tensor]) -> list[Tensor]:
    return [model(ids_T, Packing.of([len(ids_T)])) for ids_T in documents]


def assert_close(got: Tensor, want: Tensor, bound: float = CLOSE) -> None:
    assert got.shape == want.shape
    assert float((got - want).abs().max()) <= bound * float(want.abs().max())


def segments(rows: Sequence[Sequence[int]]) -> Tensor:
    """Document numbers [B, L] of rows that are filled by documents of these lengths."""
    return torch.tensor([[i for i, n in enumerate(row) for _ in range(n)] for row in rows])


def test_packed_documents_equal_each_alone(model):
    documents = draw_ids(LENGTHS)
    packed = model(torch.cat(documents), Packing.of(LENGTHS))
    for got, want in zip(packed.split(LENGTHS), alone(model, documents), strict=True):
        assert_close(got, want)


def test_segmented_rows_equal_each_document_alone(model):
    rows = [(1, 31, 32, 6), (64, 1, 5), (70,)]
    documents = draw_ids([n for row in rows for n in row])
    packed = model(torch.cat(documents), Packing.rows(segments(rows)))
    lengths = [len(ids_T) for ids_T in documents]
    for got, want in zip(packed.split(lengths), alone(model, documents), strict=True):
        assert_close(got, want)


def test_a_sequence_without_a_token_changes_nothing(model):
    documents = draw_ids((33, 0, 1, 0))
    packed = model(torch.cat(documents), Packing.of((33, 0, 1, 0)))
    want = alone(model, documents[::2])
    for got, expected in zip(packed.split((33, 1)), want, strict=True):
        assert_close(got, expected)


LAYOUTS = {
    "sequences": ([33, 2, 40], Packing.of([33, 2, 40])),
    "rows": ([33, 2, 40], Packing.rows(segments([(33, 2, 40)]))),
}


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("changed", [0, 1, 2])
def test_one_sequence_s_tokens_do_not_reach_the_others(family, changed):
    """To the last bit without experts, whose products depend on who else chose them."""
    lengths, packing = LAYOUTS["sequences"]
    model = make_model(family, num_experts=None).requires_grad_(False)
    documents = draw_ids(lengths)
    before = model(torch.cat(documents), packing).split(lengths)
    documents[changed] = (documents[changed] + 1) % 128
    after = model(torch.cat(documents), packing).split(lengths)
    for i, (old, new) in enumerate(zip(before, after, strict=True)):
        assert torch.equal(old, new) == (i != changed)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("changed", [0, 1, 2])
def test_in_rows_and_with_experts_the_others_change_by_rounding_only(model, layout, changed):
    lengths, packing = LAYOUTS[layout]
    documents = draw_ids(lengths)
    before = model(torch.cat(documents), packing).split(lengths)
    documents[changed] = (documents[changed] + 1) % 128
    after = model(torch.cat(documents), packing).split(lengths)
    for i, (old, new) in enumerate(zip(before, after, strict=True)):
        if i != changed:
            assert_close(new, old)
        else:
            assert float((new - old).abs().max()) > 0.1


def test_without_boundaries_the_first_document_would_show_in_the_second(model):
    lengths = [33, 40]
    documents = draw_ids(lengths)
    joined = model(torch.cat(documents), Packing.of([sum(lengths)])).split(lengths)[1]
    want = alone(model, documents)[1]
    for token in (0, 1, -1):
        gap = (joined[token] - want[token]).abs().max()
        assert float(gap) > 100 * CLOSE * float(want.abs().max())


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_gradients_equal_the_sum_of_those_of_each_document_alone(family, layout):
    lengths, packing = LAYOUTS[layout]
    model = make_model(family)
    documents = draw_ids(lengths)
    weights = torch.randn(sum(lengths), 128, generator=torch.Generator().manual_seed(9))
    names, parameters = zip(*model.named_parameters(), strict=True)

    def gradients(loss: Tensor) -> tuple[Tensor | None, ...]:
        return torch.autograd.grad(loss, parameters, allow_unused=True)

    packed = gradients((model(torch.cat(documents), packing) * weights).sum())
    parts = zip(alone(model, documents), weights.split(lengths), strict=True)
    single = gradients(torch.stack([(logits * w).sum() for logits, w in parts]).sum())
    for name, got, want in zip(names, packed, single, strict=True):
        if want is None:
            assert got is None, name
            assert "layers.0.self_attention_res" in name  # there is nothing to attend to yet
            continue
        assert got is not None, name
        assert float((got - want).norm()) <= 1e-4 * float(want.norm()), name


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_document_s_loss_has_no_gradient_in_the_others(family, layout):
    lengths, packing = LAYOUTS[layout]
    model = make_model(family)
    table = model.model.embed_tokens.weight
    # Each document has ids of its own, so that a row of the table tells whose gradient it is.
    documents = [ids_T % 40 + 40 * i for i, ids_T in enumerate(draw_ids(lengths))]
    logits = model(torch.cat(documents), packing).split(lengths)
    for i, own in enumerate(logits):
        (grad,) = torch.autograd.grad(own.square().sum(), table, retain_graph=True)
        for j, ids_T in enumerate(documents):
            if i == j:
                assert bool(grad[ids_T].any())
            elif layout == "sequences":
                assert not bool(grad[ids_T].any())
            else:
                # In a row the decays of earlier documents cancel: to rounding, not to the last bit.
                assert float(grad[ids_T].norm()) < 1e-6 * float(grad.norm())


@settings(max_examples=15, deadline=None, derandomize=True)
@given(
    lengths=st.lists(st.integers(1, 50), min_size=1, max_size=5),
    family=st.sampled_from(sorted(FAMILIES)),
    seed=st.integers(0, 99),
)
def test_any_lengths(lengths, family, seed):
    model, documents = MODELS[family], draw_ids(lengths, seed)
    want = alone(model, documents)
    ids_T = torch.cat(documents)
    layouts = [Packing.of(lengths), Packing.rows(segments([lengths]))]
    for packing in layouts:
        for got, expected in zip(model(ids_T, packing).split(lengths), want, strict=True):
            assert_close(got, expected)


@given(st.lists(st.integers(0, 9), min_size=1, max_size=6))
def test_rows_and_packed_tokens_translate_into_each_other(lengths):
    packing = Packing.of(lengths)
    x_TD = torch.arange(2.0 * sum(lengths)).view(-1, 2) + 1
    rows_BLD = packing.to_rows(x_TD)
    assert rows_BLD.shape == (len(lengths), max(lengths), 2)
    for row, piece in zip(rows_BLD, x_TD.split(lengths), strict=True):
        assert torch.equal(row[: len(piece)], piece)
        assert not row[len(piece) :].any()
    assert torch.equal(packing.from_rows(rows_BLD), x_TD)
    assert Packing.from_cu_seqlens(packing.cu_seqlens) == packing
    assert packing.num_tokens == sum(lengths) == packing.cu_seqlens[-1]
    assert packing.is_one_each == all(n == 1 for n in lengths)
    if all(lengths):
        assert [x + 1 for x in packing.last_T] == list(packing.cu_seqlens[1:])
    else:
        with pytest.raises(ValueError, match="has no last one"):
            _ = packing.last_T


def test_dense_rows_are_views():
    x_TD = torch.zeros(6, 2)
    packing = Packing.of([3, 3])
    assert packing.to_rows(x_TD).data_ptr() == x_TD.data_ptr()
    assert packing.from_rows(packing.to_rows(x_TD)).data_ptr() == x_TD.data_ptr()


@pytest.mark.parametrize("lengths", [[], [-1, 2]])
def test_a_pack_needs_a_sequence_and_no_negative_one(lengths):
    with pytest.raises(ValueError, match="one or more lengths from 0 up"):
        Packing.of(lengths)


@pytest.mark.parametrize("offsets", [[], [0], [0, 5, 2]])
def test_offsets_must_not_fall(offsets):
    with pytest.raises(ValueError, match="one or more lengths from 0 up"):
        Packing.from_cu_seqlens(offsets)
