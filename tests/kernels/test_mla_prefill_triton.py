"""Triton's prefill beyond what the checks draw: tables, layouts, compiled graphs, the library."""

from __future__ import annotations

from itertools import pairwise
from typing import NamedTuple

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.nn.functional import scaled_dot_product_attention

from perilune.kernels.common.packing import Packing
from perilune.kernels.mla import reference, sdpa, triton_join
from perilune.kernels.mla import triton_prefill as entry
from perilune.kernels.mla.bench_cases import prefill, prefill_work
from perilune.kernels.mla.triton_prefill_table import documents, tiles

CPU = torch.device("cpu")
SEGMENTS = torch.tensor([[3, 3, 5, 5, 5, 5, 9], [1, 2, 2, 2, 2, 1, 1]])


def drawn(lengths, keys=None, heads=2, own=8, shared=4, seed=0):
    generator = torch.Generator().manual_seed(seed)
    t, s = sum(lengths), sum(keys or lengths)
    shapes = (t, heads, own + shared), (s, heads, own), (s, shared), (s, heads, 6)
    return [torch.randn(shape, generator=generator) for shape in shapes]


def gradients(op, tensors):
    leaves = [x.detach().requires_grad_() for x in tensors]
    o_THV = op(*leaves)
    weight = torch.randn(o_THV.shape, generator=torch.Generator().manual_seed(7))
    return [o_THV.detach(), *torch.autograd.grad((o_THV * weight).sum(), leaves)]


packs = st.lists(st.tuples(st.integers(0, 70), st.integers(0, 70)), min_size=1, max_size=5)


@given(packs, st.sampled_from([16, 32]), st.sampled_from([16, 64]))
def test_tiles_hold_every_query_and_key_once_the_busiest_first(pack, queries, keys):
    lengths = tuple(t for t, _ in pack)
    key_lengths = tuple(t + front for t, front in pack)
    table = tiles(lengths, key_lengths, queries, keys, CPU)
    held = [q for first, end, *_ in table.query_I4.tolist() for q in range(first, end)[:queries]]
    assert sorted(held) == list(range(sum(lengths)))
    held = [k for first, end, *_ in table.key_I5.tolist() for k in range(first, end)[:keys]]
    assert sorted(held) == list(range(sum(key_lengths)))
    seen = [first + shift - low for first, _, low, shift in table.query_I4.tolist()]
    assert seen == sorted(seen, reverse=True)
    seeing = [end - max(low, k - shift) for k, _, low, end, shift in table.key_I5.tolist()]
    assert seeing == sorted(seeing, reverse=True)


@given(packs)
def test_a_tile_s_last_query_sees_its_sequence_s_last_key(pack):
    lengths = tuple(t for t, _ in pack)
    key_lengths = tuple(t + front for t, front in pack)
    ends = Packing.of(lengths).cu_seqlens, Packing.of(key_lengths).cu_seqlens
    for first, end, low, shift in tiles(lengths, key_lengths, 16, 16, CPU).query_I4.tolist():
        n = ends[0].index(end) if lengths.count(0) == 0 else None
        last = end - 1 + shift + 1
        assert last in ends[1]
        assert low in ends[1]
        assert first + shift >= low
        assert n is None or (low, last) == ends[1][n - 1 : n + 1]


def test_documents_are_runs_of_a_number():
    found = documents(Packing.rows(SEGMENTS))
    first, end = [], []
    for row in range(2):
        cuts = [0, *(i for i in range(1, 7) if SEGMENTS[row, i] != SEGMENTS[row, i - 1]), 7]
        for a, b in pairwise(cuts):
            first += [7 * row + a] * (b - a)
            end += [7 * row + b] * (b - a)
    assert found is not None
    assert (found.first_T.tolist(), found.end_T.tolist()) == (first, end)
    assert documents(Packing.of([3])) is None


def test_keys_and_values_may_be_parts_of_one_projection():
    q, k, r, v = drawn((40, 3))
    joined = torch.cat([k, v], -1)
    packing = Packing.of((40, 3))

    def split(op):
        return lambda q, joined, r: op(q, joined[..., :8], r, joined[..., 8:], packing, 0.3)

    got = gradients(split(entry.mla_prefill), (q, joined, r))
    want = gradients(split(reference.mla_prefill), (q, joined, r))
    for x, y in zip(got, want, strict=True):
        torch.testing.assert_close(x, y, rtol=1e-4, atol=1e-5)


def test_no_token_at_all():
    got = gradients(lambda *x: entry.mla_prefill(*x, Packing.of([0]), 0.3), drawn((0,)))
    assert [x.shape[0] for x in got] == [0] * 5
    *_, dk, dr, dv = gradients(
        lambda *x: entry.mla_prefill(*x, Packing.of([0]), 0.3, Packing.of([5])), drawn((0,), (5,))
    )
    assert not any(x.any() for x in (dk, dr, dv))


# The compiler warns of what it meets in any code.
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    ("packing", "keys"),
    [
        (Packing.of((33, 0, 7)), None),
        (Packing.of((5, 3)), Packing.of((9, 3))),
        (Packing.rows(SEGMENTS), None),
    ],
    ids=["sequences", "keys in front", "documents"],
)
def test_it_is_one_node_of_a_compiled_graph(packing, keys):
    def op(*tensors):
        return entry.mla_prefill(*tensors, packing, 0.3, keys)

    inputs = drawn(packing.lengths, keys and keys.lengths)
    compiled = torch.compile(op, fullgraph=True, dynamic=False, backend="aot_eager")
    got, want = gradients(compiled, inputs), gradients(op, inputs)
    torch.compiler.reset()
    assert all(map(torch.equal, got, want))


@pytest.mark.parametrize("run", [entry.mla_prefill, reference.mla_prefill])
@pytest.mark.parametrize(
    ("packing", "keys", "said"),
    [
        (Packing.of((3, 2)), Packing.of((5,)), "keys of 1 sequences for 2"),
        (Packing.of((3, 2)), Packing.of((4, 1)), "2 queries are the last of 1 tokens"),
        (Packing.rows(torch.zeros(1, 5)), Packing.of((5,)), "rows of several documents"),
    ],
)
def test_keys_that_cannot_be_are_refused(run, packing, keys, said):
    with pytest.raises(ValueError, match=said):
        run(*drawn((5,)), packing, 0.3, keys)


def test_what_the_reference_serves():
    q, k, r, v = drawn((5,))
    assert entry.serves(q, k, r, v, 0.3)
    assert not entry.serves(q.double(), k.double(), r.double(), v.double(), 0.3)
    assert not entry.serves(q, k.bfloat16(), r, v, 0.3)
    assert not entry.serves(q, k, r, v, -0.3)
    assert not entry.serves(q, k, r[:, :0], v, 0.3)
    assert not entry.serves(q, torch.ones(5, 2, 129), r, v, 0.3)
    packing = Packing.of([5])
    wide = [x.double() for x in (q, k, r, v)]
    got = entry.mla_prefill(*wide, packing, 0.3)
    assert torch.equal(got, reference.mla_prefill(*wide, packing, 0.3))


class OnGPU(NamedTuple):
    is_cuda: bool = True
    dtype: torch.dtype = torch.bfloat16
    device: str = "cuda"
    shape: tuple[int, ...] = (8192, 96, 192)


@pytest.mark.parametrize(
    ("packing", "keys", "trained", "inferred"),
    [
        (Packing.of((8192,)), None, True, True),
        (Packing.of((8192,)), Packing.of((8192,)), True, True),
        (Packing.of((4096, 4096)), None, True, False),
        (Packing.of((8192,)), Packing.of((65536,)), False, False),
        (Packing.of((8192, 8200)), None, False, False),
        (Packing.of((1023,) * 8), None, False, False),
        (Packing.rows(torch.zeros(1, 8192)), None, False, False),
    ],
)
def test_the_library_gets_long_sequences_of_one_length(
    packing, keys, trained, inferred, monkeypatch
):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    q, asked = OnGPU(), (packing, keys)
    assert sdpa.is_faster(q, q, *asked, True) == trained
    assert sdpa.is_faster(q, q, *asked, False) == inferred
    monkeypatch.setattr(torch, "are_deterministic_algorithms_enabled", lambda: True)
    assert not sdpa.is_faster(q, q, *asked, True)
    assert sdpa.is_faster(q, q, *asked, False) == inferred
    monkeypatch.setattr(torch, "are_deterministic_algorithms_enabled", lambda: False)
    odd = OnGPU(shape=(8192, 96, 60))
    assert not sdpa.is_faster(odd, q, *asked, True)
    assert not sdpa.is_faster(q, odd, *asked, True)
    assert not sdpa.is_faster(OnGPU(dtype=torch.float32), q, *asked, True)
    assert not sdpa.is_faster(torch.ones(2), q, *asked, True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (8, 0))
    assert not sdpa.is_faster(q, q, *asked, True)


def test_the_library_is_called_as_it_wants_to_be(monkeypatch):
    asked = []

    def cudnn(q, k, v, bias, with_lse, dropout, causal, *, scale):
        assert (bias, dropout, causal) == (None, 0.0, True)
        asked.append(with_lse)
        return scaled_dot_product_attention(q, k, v, is_causal=True, scale=scale), None

    monkeypatch.setattr(sdpa, "cudnn_attention", cudnn)
    packing, inputs = Packing.of((20, 20)), drawn((20, 20))
    got = gradients(lambda *x: sdpa.attend(*x, packing, 0.3), inputs)
    want = gradients(lambda *x: reference.mla_prefill(*x, packing, 0.3), inputs)
    for x, y in zip(got, want, strict=True):
        torch.testing.assert_close(x, y)
    with torch.no_grad():
        sdpa.attend(*inputs, packing, 0.3)
    assert asked == [True, False]


@pytest.mark.parametrize("heads", [1, 33])
def test_keys_are_joined_from_parts_of_a_projection(heads):
    both = torch.randn(5, heads, 10), torch.randn(5, 9)

    def joined(op):
        return lambda kv, c: op(kv[..., 2:8], c[:, 6:])

    got = gradients(joined(triton_join.Join.apply), both)
    want = gradients(joined(reference.with_shared), both)
    for x, y in zip(got, want, strict=True):
        torch.testing.assert_close(x, y)
    assert triton_join.Join.apply(torch.ones(0, 2, 3), torch.ones(0, 3)).shape == (0, 2, 6)


def test_the_work_of_a_chunk_is_that_of_its_pairs():
    make = prefill((64,), 4, 8, 4, 6, in_front=192)
    inputs = make(torch.Generator(), torch.float32)
    pairs = 64 * 192 + 64 * 64 // 2
    assert prefill_work(inputs, False).flops == 2 * 4 * pairs * (12 + 6)
    assert prefill_work(inputs, True).flops == 2 * 4 * pairs * (4 * 12 + 3 * 6)
