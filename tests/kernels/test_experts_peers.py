"""The peers of the experts are called as they want to be."""

from __future__ import annotations

import sys
from types import ModuleType

import pytest
import torch
from peer_stand_ins import bound, truth
from torch._subclasses.fake_tensor import FakeTensorMode

from perilune.kernels.bench.cases import Case, num_bytes
from perilune.kernels.bench.inputs import Copies, tensors
from perilune.kernels.bench.peers import prepared, ready
from perilune.kernels.bench.verify import relative_error
from perilune.kernels.experts import bench_cases, bench_peers
from perilune.kernels.experts.bench_peers import HUMMING, TORCH
from perilune.kernels.experts.mxfp4_reference import experts_mxfp4
from perilune.kernels.experts.tiles import Packed, values
from perilune.kernels.registry import load_attr

BLOCK = 4
CASE = bench_cases.packed(5, 3, 2, 64, 96)


class FakeLayer(torch.nn.Module):
    """humming-kernels 0.1.20: one matrix an expert, pairs in blocks of one expert each."""

    def __init__(self, *, shape_n, shape_k, weight_config, num_experts, torch_dtype):
        super().__init__()
        assert weight_config == {"quant_method": "mxfp4"}
        assert torch_dtype == torch.bfloat16
        self.shape = num_experts, shape_n, shape_k
        self.humming_config = None

    def load_from_tensors(self, tensors):
        self.packed = Packed(tensors["weight"], tensors["weight_scale"])
        assert all(x.dtype == torch.uint8 for x in self.packed)
        assert self.packed.codes_EOI.shape == (*self.shape[:2], self.shape[2] // 2)

    def transform(self):
        self.humming_config = self.shape

    def forward(self, inputs, *, top_k, sorted_ids, expert_ids, num_tokens_padded,
                compute_config, tuning_config):  # fmt: skip
        assert compute_config == {"gemm_type": "indexed"}
        assert tuning_config["block_shape"][0] == BLOCK
        assert {x.dtype for x in (sorted_ids, expert_ids, num_tokens_padded)} == {torch.int32}
        assert int(num_tokens_padded) == len(sorted_ids) == BLOCK * len(expert_ids)
        weights, pairs = values(self.packed, inputs.dtype), len(inputs) * top_k
        out = inputs.new_full((pairs, self.shape[1]), torch.nan)
        for place, pair in enumerate(sorted_ids.tolist()):
            if pair < pairs:
                out[pair] = weights[expert_ids[place // BLOCK]] @ inputs[pair // top_k]
        return out


@pytest.fixture(autouse=True)
def fake_humming(monkeypatch):
    def get_heuristics_config(layer_config, shape_m=None, gemm_type="dense"):
        assert layer_config is not None
        assert shape_m == 10
        assert gemm_type == "indexed"
        return {"block_shape": (BLOCK, 128, 64)}

    for name in ("humming", "humming.layer", "humming.tune"):
        module = ModuleType(name)
        module.__spec__ = object()
        monkeypatch.setitem(sys.modules, name, module)
    sys.modules["humming.layer"].HummingLayer = FakeLayer
    sys.modules["humming.tune"].get_heuristics_config = get_heuristics_config


@pytest.mark.parametrize(("peer", "bound_of"), [(HUMMING, 1e-5), (TORCH, 1e-2)])
def test_a_peer_computes_the_same_from_the_same_inputs(peer, bound_of):
    found = bound(peer, CASE, truth(experts_mxfp4))
    assert found.note == ""
    assert found.errors.outputs is not None
    assert found.errors.outputs < bound_of


@pytest.mark.parametrize("peer", [HUMMING, TORCH])
def test_a_peer_holds_the_weights_once_and_takes_every_batch(peer, monkeypatch):
    made, prepare = [], load_attr(peer.prepare)
    monkeypatch.setattr(bench_peers, prepare.__name__, lambda x: made.append(prepare(x)) or made[0])
    copies = Copies(CASE, torch.device("cpu"))
    copies.rotate_beyond(0)
    found = ready(peer, CASE, copies, truth(experts_mxfp4))
    assert len(made) == 1
    got = [call() for call in found.contender._calls]
    want = [experts_mxfp4(**inputs) for inputs in copies.copies]
    assert len(got) == len(want) == 3
    for y_TL, true_TL in zip(got, want, strict=True):
        assert relative_error(y_TL, true_TL) < 1e-2
    assert relative_error(want[1], want[0]) > 0.1


def test_weights_of_a_case_without_shared_ones_are_not_those_of_its_first_copy():
    alone = Case(make=lambda g, d: CASE.make(g, d) | CASE.shared(g, d))
    with pytest.raises(AssertionError, match="every copy would get the first one's"):
        prepared(TORCH, Copies(alone, torch.device("cpu")))


def test_every_case_of_a_layer_and_of_a_gpu_of_eight_has_both():
    cases = bench_cases.BENCHES["experts_mxfp4"].cases
    assert {name for name, case in cases.items() if case.peers == (TORCH, HUMMING)} == {
        f"T{t}_{of}" for t in (1, 32, 128, 256, 1024, 4096) for of in ("E112_R2", "E896_R16")
    }


def test_weights_and_those_of_both_peers_fit_an_h200():
    """With what Humming's transformation takes at once: a second gate and up, and a third."""
    case = bench_cases.BENCHES["experts_mxfp4"].cases["T4096_E896_R16"]
    with FakeTensorMode():
        shared = case.shared(torch.Generator(), torch.bfloat16)
        own = case.make(torch.Generator(), torch.bfloat16)
    w13, w2 = (num_bytes(shared[name]) for name in ("w13_EMKW", "w2_EMKW"))
    codes = 896 * 3 * 3072 * 3584
    assert w13 + w2 == codes * 4.25 / 8
    as_bf16, own_bytes = 2 * codes, 3 * num_bytes(*tensors(own).values())
    assert 2 * (w13 + w2) + as_bf16 + 2 * w13 + own_bytes < 115e9
