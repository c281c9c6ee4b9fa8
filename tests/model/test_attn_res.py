"""The stream of Block AttnRes at K3's depth, against sums and mixtures taken one by one."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from perilune.kernels.attn_res.reference import attn_res
from perilune.model.attn_res import AttnResStream, Query
from perilune.model.norm import RMSNorm

LAYERS, BLOCK, TOKENS, WIDTH = 93, 12, 2, 8


def drawn(*shape: int, seed: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def site(seed: int) -> tuple[Query, RMSNorm, RMSNorm]:
    query, norm, then = Query(WIDTH), RMSNorm(WIDTH, 1e-5), RMSNorm(WIDTH, 1e-6)
    query.weight.data = drawn(1, WIDTH, seed=seed)
    norm.weight.data = 1 + 0.1 * drawn(WIDTH, seed=seed + 1)
    then.weight.data = drawn(WIDTH, seed=seed + 2)
    return query, norm, then


class Plain:
    """Every sum and every block is a copy of its own; a read looks at all of them."""

    def __init__(self, embedding: Tensor) -> None:
        self.blocks: list[Tensor] = []
        self.updates = [embedding]

    def sources(self) -> list[Tensor]:
        total = self.updates[0].clone()
        for update in self.updates[1:]:
            total = total + update
        return [*self.blocks, total]

    def read(self, query: Query, norm: RMSNorm, then: RMSNorm) -> Tensor:
        *blocks, total = self.sources()
        return then(attn_res(total, blocks, query.scaled(norm), norm.eps).h_TD)


def run_both() -> tuple[AttnResStream, Plain, list[Tensor], list[Tensor], list[int]]:
    """Layers whose updates are what they read, shrunk and turned."""
    embedding = drawn(TOKENS, WIDTH, seed=1)
    stream, plain = AttnResStream(embedding), Plain(embedding.clone())
    got, want, counts = [], [], []
    for read in range(2 * LAYERS):
        query, norm, then = site(10 * read)
        got.append(stream.read(query, norm, then))
        want.append(plain.read(query, norm, then))
        counts.append(len(plain.sources()))
        if read % (2 * BLOCK) == 0:
            stream.commit()
            plain.blocks, plain.updates = plain.sources(), []
        stream.add(0.3 * got[-1].roll(1, -1))
        plain.updates.append(0.3 * want[-1].roll(1, -1))
    return stream, plain, got, want, counts


@pytest.mark.parametrize("grad", [False, True])
def test_no_bank_is_overwritten_at_a_depth_of_full_blocks_and_a_remainder(grad):
    with torch.set_grad_enabled(grad):
        stream, plain, got, want, counts = run_both()
    assert counts[-1] == max(counts) == 9
    assert len(stream.blocks) == len(plain.blocks) == 8
    for bank, true in zip(stream.blocks, plain.blocks, strict=True):
        torch.testing.assert_close(bank, true)
    for read, true in zip(got, want, strict=True):
        torch.testing.assert_close(read, true, rtol=1e-4, atol=1e-5)


def test_blocks_stay_where_they_are_and_a_read_copies_none():
    stream, *_ = run_both()
    before = [bank.data_ptr() for bank in stream.blocks]
    query, norm, then = site(3)
    stream.read(query, norm, then)
    assert stream.update is None
    assert [bank.data_ptr() for bank in stream.blocks] == before
    sum_before = stream.partial
    stream.read(query, norm, then)
    assert stream.partial is sum_before


def test_two_updates_without_a_read_between_are_both_in_the_sum():
    first, second, third = (drawn(TOKENS, WIDTH, seed=i) for i in range(3))
    stream = AttnResStream(first)
    stream.add(second)
    stream.add(third)
    stream.commit()
    torch.testing.assert_close(stream.blocks, [first + second + third])
    assert stream.partial is None
    stream.add(second)
    assert stream.partial is second


def test_one_source_is_what_is_read():
    embedding = drawn(TOKENS, WIDTH, seed=1)
    query, norm, then = site(5)
    assert AttnResStream(embedding).read(query, norm) is embedding
    assert torch.equal(AttnResStream(embedding).read(query, norm, then), then(embedding))
