"""The training of two layers beside fla's KDA and plain PyTorch: the whole case, at toy sizes."""

from __future__ import annotations

import peer_stand_ins
import pytest
import torch

from perilune.cli import kernels_layer
from perilune.cli.kernels_layer import KDA_LAYER, MLA_LAYER, STACK
from perilune.kernels import registry
from perilune.kernels.bench.ceilings import Ceilings
from perilune.kernels.registry import OPS, recorded, replaced, spec
from perilune.kernels.router import reference
from perilune.model import layer_bench, stack_bench
from perilune.model.parse_config import parse_config
from perilune.model.presets import tiny_k3
from perilune.model.stack_bench import Stack, as_chosen_in, difference, peers_ops, with_experts

CPU = torch.device("cpu")
RATES = Ceilings(1e10, 1e11)
EXPERTS, TOKENS = 24, 40

pytestmark = pytest.mark.usefixtures("kda_peers")


def tiny():
    return tiny_k3(
        num_hidden_layers=MLA_LAYER + 1,
        attn_res_block_size=12,
        num_experts_per_token=4,
        linear_attn={"head_dim": 16},
    )


def stack():
    config = with_experts(parse_config(tiny()), EXPERTS)
    return Stack(config, (KDA_LAYER, MLA_LAYER), TOKENS, CPU, torch.bfloat16)


def theirs():
    return peers_ops(set(OPS) - {"permute"})


def test_the_case_runs_as_it_is_called(monkeypatch):
    """But for sizes and the device; conformance of every op has tests of its own."""
    asked = []
    monkeypatch.setattr(kernels_layer, "kimi_k3", tiny)
    monkeypatch.setattr(kernels_layer, "STACK_TOKENS", TOKENS)
    monkeypatch.setattr(kernels_layer, "STACK_EXPERTS", EXPERTS)
    monkeypatch.setattr(stack_bench, "require_green", lambda calls: asked.extend(calls))
    told = CPU, RATES, 0.01, "abc", "2026-11-30"
    ((name, (row,)),) = kernels_layer.measured(STACK, *told)
    assert (name, row.case, row.peer) == (STACK, STACK, "fla and plain PyTorch")
    assert 0 < row.p10_ms <= row.median_ms <= row.p90_ms
    assert row.floor_ms > 0
    assert row.ratio == pytest.approx(row.peer_median_ms / row.median_ms)
    assert row.peer_error < 0.02
    assert {call.op for call in asked} == {
        *("linear", "attn_res", "causal_conv", "kda_chunk", "gated_rms_norm", "rms_norm"),
        *("mla_prefill", "scores", "router", "experts", "situ", "sigmoid_gate"),
    }


def test_fla_serves_the_peer_s_kda():
    with replaced(theirs()):
        stack().run()
    (call,) = peer_stand_ins.called
    assert call["q"].shape == (1, TOKENS, 4, 16)
    assert call["q"].dtype == torch.bfloat16
    assert call["cu_seqlens"] is None


def test_the_rest_of_the_peer_is_plain_torch_on_one_sequence():
    """Without a segment mask, torch's attention takes its fused kernels."""
    with recorded() as calls:
        stack().run()
    plain = {op: run for op, run in theirs().items() if op not in ("kda_chunk", "experts")}
    for op, run in plain.items():
        assert run is registry.load_attr(spec(op).reference)
    (attention,) = (call for call in calls if call.op == "mla_prefill")
    assert layer_bench.inputs_of(attention)["packing"].segment_BL is None


def test_near_ties_that_fall_the_other_way_are_no_difference():
    """A peer of other roundings chooses another expert here and there."""
    here = stack()

    def rounded(logits_TE, *rest):
        return reference.route(logits_TE + 0.02 * torch.randn_like(logits_TE), *rest)

    with recorded() as calls:
        own = here.run()
    torch.manual_seed(0)
    with replaced({"router": rounded}):
        assert difference(here.run(), own) > stack_bench.MOST_APART
    with replaced({"router": as_chosen_in(calls)}):
        assert difference(here.run(), own) < 1e-6
