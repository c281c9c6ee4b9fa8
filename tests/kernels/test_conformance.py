"""Every op against its float64 truth, and proof that a wrong reference is caught.

A fault is planted by a wrong twin of the reference; a check that stays green would check nothing.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from perilune.kernels import registry, testing
from perilune.kernels.attn_res.reference import attn_res
from perilune.kernels.causal_conv import reference as conv
from perilune.kernels.common.packing import Packing
from perilune.kernels.experts.reference import experts
from perilune.kernels.kda import reference as kda
from perilune.kernels.mla import reference as mla
from perilune.kernels.norm.reference import gated_rms_norm, rms_norm
from perilune.kernels.registry import OPS, spec
from perilune.kernels.router.reference import Routes, route
from perilune.kernels.situ.reference import situ_glu
from perilune.kernels.testing import check

PAIRS = [(op, case) for op in OPS for case in spec(op).cases]


@pytest.mark.parametrize(("op", "case"), PAIRS, ids=lambda value: value)
@pytest.mark.parametrize("seed", [0, 1])
def test_the_reference_equals_the_truth(op, case, seed):
    declared = spec(op)
    one = replace(declared, cases={case: declared.cases[case]})
    results = list(check(one, seed=seed))
    assert results
    for result in results:
        assert result.passed, result


@pytest.mark.parametrize("op", OPS)
def test_gradients_are_checked_where_training_needs_them(op):
    graded = {r.what for r in check(spec(op)) if r.what.startswith("grad ")}
    if op.endswith("_decode") and op != "mla_decode":
        assert not graded  # they write into their state
    else:
        assert graded


def changed(x: dict[str, Any], **new: Any) -> dict[str, Any]:
    return {**x, **new}


def undecayed_delta(
    q_THK: Tensor,
    k_THK: Tensor,
    v_THV: Tensor,
    z_THK: Tensor,
    b_TH: Tensor,
    A_log_H: Tensor,
    dt_bias_HK: Tensor,
    packing: Packing,
    lower_bound: float | None = None,
    state_NHKV: Tensor | None = None,
) -> kda.KDAOut:
    """The recurrence with its delta taken against the state before the decay."""
    x = kda.prepare(q_THK, k_THK, v_THV, z_THK, b_TH, A_log_H, dt_bias_HK, lower_bound)
    outputs, states = [], []
    for n, start in enumerate(packing.cu_seqlens[:-1]):
        s_HKV = x.v_.new_zeros(*x.k_.shape[1:], x.v_.shape[-1])
        if state_NHKV is not None:
            s_HKV = state_NHKV[n]
        for t in range(start, packing.cu_seqlens[n + 1]):
            delta_HV = x.v_[t] - torch.einsum("hkv,hk->hv", s_HKV, x.k_[t])
            write_HKV = (x.beta_[t][:, None] * x.k_[t])[..., None] * delta_HV[:, None, :]
            s_HKV = x.g_[t].exp()[..., None] * s_HKV + write_HKV
            outputs.append(torch.einsum("hkv,hk->hv", s_HKV, x.q_[t]))
        states.append(s_HKV)
    return kda.KDAOut(torch.stack(outputs), torch.stack(states))


def leaking_chunk(*args: Any, packing: Packing, **more: Any) -> kda.KDAOut:
    out = kda.kda_chunk(*args, packing=Packing.of(packing.lengths), **more)
    return kda.KDAOut(out.o_THV, None if packing.segment_BL is not None else out.state_NHKV)


def clamped_gate(*args: Any, lower_bound: float | None = None, **more: Any) -> kda.KDAOut:
    """A clamp of the softplus decay: not the bounded gate."""
    del lower_bound
    return kda.kda_chunk(*args, lower_bound=None, **more)


def read_before_write(**x: Any) -> Tensor:
    state = x["state_NHKV"]
    before = state.clone()
    kda.kda_decode(**x)
    q_NHK = kda.l2_norm(x["q_NHK"]) * x["q_NHK"].shape[-1] ** -0.5
    return (q_NHK[:, :, None, :] @ before)[:, :, 0]


def state_not_kept(**x: Any) -> Tensor:
    return kda.kda_decode(**changed(x, state_NHKV=x["state_NHKV"].clone()))


def reversed_taps(x_TC: Tensor, weight_CW: Tensor, *rest: Any, **more: Any) -> conv.ConvOut:
    return conv.causal_conv(x_TC, weight_CW.flip(1), *rest, **more)


def forgotten_window(*, window_NWC: Tensor | None, **x: Any) -> conv.ConvOut:
    return conv.causal_conv(window_NWC=None, **x)


def leaking_conv(*, packing: Packing, **x: Any) -> conv.ConvOut:
    out = conv.causal_conv(packing=Packing.of(packing.lengths), **x)
    return conv.ConvOut(out.y_TC, None if packing.segment_BL is not None else out.window_NWC)


def window_not_kept(**x: Any) -> Tensor:
    return conv.causal_conv_decode(**changed(x, window_NWC=x["window_NWC"].clone()))


def other_eps(op: Callable[..., Any], eps: float) -> Callable[..., Any]:
    def with_other_eps(**x: Any) -> Any:
        return op(**changed(x, eps=eps))

    return with_other_eps


def silu_gate(x_D: Tensor, gate_D: Tensor, weight_D: Tensor, eps: float) -> Tensor:
    return gated_rms_norm(x_D, gate_D, weight_D, eps) * gate_D


def gate_before_norm(x_D: Tensor, gate_D: Tensor, weight_D: Tensor, eps: float) -> Tensor:
    return rms_norm(x_D * torch.sigmoid(gate_D), weight_D, eps)


def mixes_normalised(sources_TD: Tensor, query_D: Tensor, eps: float) -> Tensor:
    unit = torch.ones_like(query_D)
    return attn_res(rms_norm(sources_TD, unit, eps), query_D, eps)


def scaled_scores(sources_TD: Tensor, query_D: Tensor, eps: float) -> Tensor:
    return attn_res(sources_TD, query_D * query_D.shape[0] ** -0.5, eps)


def higher_index_wins(
    logits_TE: Tensor, bias_E: Tensor, num_active: int, renormalize: bool, scale: float
) -> Routes:
    routes = route(logits_TE.flip(1), bias_E.flip(0), num_active, renormalize, scale)
    last = logits_TE.shape[1] - 1
    return Routes(last - routes.expert_TR, routes.weight_TR, routes.score_TE.flip(1))


def biased_weights(
    logits_TE: Tensor, bias_E: Tensor, num_active: int, renormalize: bool, scale: float
) -> Routes:
    routes = route(logits_TE, bias_E, num_active, renormalize, scale)
    chosen = (routes.score_TE + bias_E).gather(-1, routes.expert_TR)
    return routes._replace(weight_TR=chosen / chosen.sum(-1, keepdim=True) * scale)


def without_scale(**x: Any) -> Routes:
    return route(**changed(x, scale=1.0))


def without_renormalising(**x: Any) -> Routes:
    return route(**changed(x, renormalize=False))


def weights_before_w2(
    x_TL: Tensor,
    expert_TR: Tensor,
    weight_TR: Tensor,
    w13_E2IL: Tensor,
    w2_ELI: Tensor,
    activation: Callable[[Tensor], Tensor],
) -> Tensor:
    """The weights on the input of an expert, not on its output."""
    columns = [
        experts(
            x_TL * weight_TR[:, r, None],
            expert_TR[:, r, None],
            torch.ones_like(weight_TR[:, r, None]),
            w13_E2IL,
            w2_ELI,
            activation,
        )
        for r in range(expert_TR.shape[1])
    ]
    return torch.stack(columns).sum(0)


def up_before_gate(**x: Any) -> Tensor:
    gate, up = x["w13_E2IL"].chunk(2, dim=1)
    return experts(**changed(x, w13_E2IL=torch.cat([up, gate], dim=1)))


def without_softmax_scale(**x: Any) -> Tensor:
    return mla.mla_prefill(**changed(x, scale=1.0))


def leaking_prefill(*, packing: Packing, **x: Any) -> Tensor:
    return mla.mla_prefill(packing=Packing.of(packing.lengths), **x)


def whole_batch_prefill(*, packing: Packing, **x: Any) -> Tensor:
    return mla.mla_prefill(packing=Packing.of([packing.num_tokens]), **x)


def mixes_last_channels(q_HC: Tensor, latent_SC: Tensor, kv_lora_rank: int, scale: float) -> Tensor:
    p_HS = torch.softmax(q_HC @ latent_SC.t() * scale, dim=-1)
    return p_HS @ latent_SC[:, -kv_lora_rank:]


def latent_scores_only(q_HC: Tensor, latent_SC: Tensor, kv_lora_rank: int, scale: float) -> Tensor:
    p_HS = torch.softmax(q_HC[:, :kv_lora_rank] @ latent_SC[:, :kv_lora_rank].t() * scale, dim=-1)
    return p_HS @ latent_SC[:, :kv_lora_rank]


def sigmoid_of_capped(gate_up_2I: Tensor, beta: float, linear_beta: float | None) -> Tensor:
    gate, up = gate_up_2I.chunk(2, dim=-1)
    capped = beta * torch.tanh(gate / beta)
    if linear_beta is not None:
        up = linear_beta * torch.tanh(up / linear_beta)
    return capped * torch.sigmoid(capped) * up


def uncapped_up(gate_up_2I: Tensor, beta: float, linear_beta: float | None) -> Tensor:
    return situ_glu(gate_up_2I, beta, None)


FAULTS: list[tuple[str, Callable[..., Any]]] = [
    ("kda_chunk", leaking_chunk),
    ("kda_chunk", clamped_gate),
    ("kda_recurrent", undecayed_delta),
    ("kda_decode", read_before_write),
    ("kda_decode", state_not_kept),
    ("causal_conv", reversed_taps),
    ("causal_conv", forgotten_window),
    ("causal_conv", leaking_conv),
    ("causal_conv_decode", window_not_kept),
    ("rms_norm", other_eps(rms_norm, 1.1e-5)),
    ("gated_rms_norm", silu_gate),
    ("gated_rms_norm", gate_before_norm),
    ("attn_res", other_eps(attn_res, 1e-6)),
    ("attn_res", mixes_normalised),
    ("attn_res", scaled_scores),
    ("router", higher_index_wins),
    ("router", biased_weights),
    ("router", without_scale),
    ("router", without_renormalising),
    ("experts", weights_before_w2),
    ("experts", up_before_gate),
    ("mla_prefill", without_softmax_scale),
    ("mla_prefill", leaking_prefill),
    ("mla_prefill", whole_batch_prefill),
    ("mla_decode", mixes_last_channels),
    ("mla_decode", latent_scores_only),
    ("situ", sigmoid_of_capped),
    ("situ", uncapped_up),
]
"""An op, and a wrong implementation of it that the checks must refuse."""


def planted(op: str, run: Callable[..., Any], monkeypatch, backend: str = "") -> registry.OpSpec:
    """Op `op` with `run` for its reference, or for one of its backends."""
    declared = spec(op)
    monkeypatch.setattr(
        testing,
        "load_attr",
        lambda path: run if path == "planted:fault" else registry.load_attr(path),
    )
    truth = declared.oracle or declared.reference
    if backend:
        return replace(declared, oracle=truth, backends={backend: "planted:fault"})
    return replace(declared, oracle=truth, reference="planted:fault", backends={})


@pytest.mark.parametrize(
    ("op", "wrong"), FAULTS, ids=lambda value: getattr(value, "__name__", value)
)
def test_a_planted_fault_is_caught(op, wrong, monkeypatch):
    results = list(check(planted(op, wrong, monkeypatch)))
    assert any(not result.passed for result in results)


@pytest.mark.parametrize("op", OPS)
def test_every_op_has_a_planted_fault_and_passes_without_one(op, monkeypatch):
    assert op in dict(FAULTS)
    right = registry.load_attr(spec(op).reference)
    assert all(result.passed for result in check(planted(op, right, monkeypatch)))


@pytest.mark.parametrize("op", [op for op in OPS if "cpu" in spec(op).backends])
def test_a_fault_in_a_cpu_backend_is_caught(op, monkeypatch):
    results = list(check(planted(op, dict(FAULTS)[op], monkeypatch, backend="cpu")))
    assert {r.backend for r in results if not r.passed} == {"cpu"}


def test_the_l2_eps_is_that_of_the_release():
    """Every form of the recurrence shares it, so that only its own formula can tell."""
    small = torch.full((1, 4), 1e-3, dtype=torch.float64)
    want = small / (small.square().sum() + 1e-6).sqrt()
    torch.testing.assert_close(kda.l2_norm(small), want, rtol=1e-12, atol=0)


def test_a_missing_gradient_is_caught(monkeypatch):
    def detached(**x: Any) -> Tensor:
        return rms_norm(x["x_D"], x["weight_D"].detach(), x["eps"])

    results = list(check(planted("rms_norm", detached, monkeypatch)))
    assert {r.what for r in results if not r.passed} == {"grad weight_D"}


def test_a_surplus_output_is_caught(monkeypatch):
    def talkative(**x: Any) -> tuple[Tensor, Tensor]:
        return situ_glu(**x), x["gate_up_2I"]

    results = list(check(planted("situ", talkative, monkeypatch)))
    assert "output 1" in {r.what for r in results if r.error == math.inf}
