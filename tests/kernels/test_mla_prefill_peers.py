"""Peers of prefill are called as they want to be."""

from __future__ import annotations

import sys
from types import ModuleType

import pytest
import torch
from peer_stand_ins import bound, truth
from torch.nn.attention import SDPBackend

from perilune.kernels.bench.cases import Case
from perilune.kernels.common.packing import Packing
from perilune.kernels.mla import prefill_peers
from perilune.kernels.mla.bench_cases import prefill
from perilune.kernels.mla.reference import mla_prefill

PEERS = [prefill_peers.CUDNN, prefill_peers.FLASH]


def plain(padded):
    return lambda inputs, backward: prefill_peers._sdpa(
        inputs, backward, SDPBackend.MATH, padded=padded
    )


@pytest.mark.parametrize("backward", [False, True])
@pytest.mark.parametrize("lengths", [(40,), (9, 9), (5, 17)])
@pytest.mark.parametrize("peer", PEERS, ids=lambda peer: peer.name)
def test_torch_s_attention_computes_the_same(peer, lengths, backward, monkeypatch):
    """On a CPU by its plain backend."""
    function = peer.bind.partition(":")[2]
    monkeypatch.setattr(prefill_peers, function, plain(function == "flash"))
    case = Case(make=prefill(lengths, 2, 8, 4, 6), backward=backward)
    found = bound(peer, case, truth(mla_prefill, backward=backward))
    assert found.note == ""
    assert found.errors.outputs < 1e-6


def test_keys_in_front_are_not_theirs():
    case = Case(make=prefill((8,), 2, 8, 4, 6, in_front=4))
    for peer in PEERS:
        assert (
            bound(peer, case, truth(mla_prefill)).note == "failed: keys in front are not called for"
        )


def test_flash_attention_3(monkeypatch):
    def varlen(q, k, v, *, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, **rest):
        assert cu_seqlens_q is cu_seqlens_k
        assert (cu_seqlens_q.dtype, max_seqlen_q, max_seqlen_k) == (torch.int32, 17, 17)
        assert rest.pop("causal")
        packing = Packing.from_cu_seqlens(cu_seqlens_q.tolist())
        none = k[:, 0, :0]
        return mla_prefill(q, k, none, v, packing, rest.pop("softmax_scale")), None

    module = ModuleType("flash_attn_interface")
    module.__spec__ = object()
    module.flash_attn_varlen_func = varlen
    monkeypatch.setitem(sys.modules, "flash_attn_interface", module)
    found = bound(
        prefill_peers.FLASH_3, Case(make=prefill((5, 17), 2, 8, 4, 6)), truth(mla_prefill)
    )
    assert found.note == ""
    assert found.errors.outputs < 1e-6
