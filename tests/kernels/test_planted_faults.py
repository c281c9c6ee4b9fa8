"""A check that cannot fail proves nothing: wrong twins of every reference, each to be caught.

A fault alters what a reference is fed, what it returns, or a function inside of it.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any, NamedTuple
from unittest import mock

import pytest
import torch
from torch import Tensor, nn

from perilune.kernels import registry
from perilune.kernels.causal_conv import reference as conv
from perilune.kernels.common.packing import Packing
from perilune.kernels.kda import reference as kda
from perilune.kernels.mla import reference as mla
from perilune.kernels.mla.reference import mla_prefill
from perilune.kernels.norm.reference import rms_norm
from perilune.kernels.registry import OPS, spec
from perilune.kernels.router.permutation import Permutation, permute
from perilune.kernels.router.reference import Routes, route
from perilune.kernels.situ.reference import situ_glu
from perilune.kernels.testing import check, implementation

Run = Callable[..., Any]


class Fault(NamedTuple):
    op: str
    name: str
    run: Run


def reference(op: str) -> Run:
    return registry.load_attr(spec(op).reference)


def fed(op: str, name: str, **changes: Callable[[dict[str, Any]], Any]) -> Fault:
    """The reference on altered arguments, each made from all of the true ones."""

    def run(**x: Any) -> Any:
        return reference(op)(**x | {key: change(x) for key, change in changes.items()})

    return Fault(op, name, run)


def returned(op: str, name: str, change: Callable[..., Any]) -> Fault:
    """The reference with `change(out, **arguments)` for its output."""
    return Fault(op, name, lambda **x: change(reference(op)(**x), **x))


def inside(op: str, name: str, owner: Any, attr: str, wrong: Run) -> Fault:
    """The reference with another function in place of one that it calls."""

    def run(**x: Any) -> Any:
        with mock.patch.object(owner, attr, wrong):
            return reference(op)(**x)

    return Fault(op, name, run)


def constant(value: Any) -> Callable[[dict[str, Any]], Any]:
    return lambda x: value


prepare = kda.prepare


def prepared(name: str, change: Callable[..., kda.Prepared]) -> Fault:
    """A fault between the projections and the recurrence."""

    def wrong(*args: Any) -> kda.Prepared:
        return change(prepare(*args), *args)

    return inside("kda_chunk", name, kda, "prepare", wrong)


def normalised(name: str, wrong: Run) -> Fault:
    return inside("kda_chunk", name, kda, "l2_norm", wrong)


def gated(name: str, wrong: Run) -> Fault:
    return inside("kda_chunk", name, kda, "gate", wrong)


def squares(x: Tensor) -> Tensor:
    return x.square().sum(-1, keepdim=True)


def softplus_decay(z_THK: Tensor, rate_H: Tensor) -> Tensor:
    return -rate_H[:, None] * nn.functional.softplus(z_THK)


def clamped_gate(z_THK: Tensor, A_log_H: Tensor, lower_bound: float | None) -> Tensor:
    return softplus_decay(z_THK, A_log_H.exp()).clamp(min=lower_bound or -math.inf)


def raw_rate(z_THK: Tensor, A_log_H: Tensor, lower_bound: float | None) -> Tensor:
    if lower_bound is None:
        return softplus_decay(z_THK, A_log_H.abs())
    return lower_bound * torch.sigmoid(A_log_H[:, None] * z_THK)


def always_five(z_THK: Tensor, A_log_H: Tensor, lower_bound: float | None) -> Tensor:
    bounded = -5.0 * torch.sigmoid(A_log_H.exp()[:, None] * z_THK)
    return softplus_decay(z_THK, A_log_H.exp()) if lower_bound is None else bounded


def rate_after_sigmoid(z_THK: Tensor, A_log_H: Tensor, lower_bound: float | None) -> Tensor:
    rate_H1 = A_log_H.exp()[:, None]
    if lower_bound is None:
        return -nn.functional.softplus(rate_H1 * z_THK)
    return lower_bound * rate_H1 * torch.sigmoid(z_THK)


def undecayed_delta(*, packing: Packing, **x: Any) -> kda.KDAOut:
    """The recurrence with its delta taken against the state before the decay."""
    state, bound = x.pop("state_NHKV"), x.pop("lower_bound")
    x.pop("cuts")
    p = prepare(*x.values(), bound)
    outputs, states = [], []
    for n, start in enumerate(packing.cu_seqlens[:-1]):
        s_HKV = p.v_.new_zeros(*p.k_.shape[1:], p.v_.shape[-1]) if state is None else state[n]
        for t in range(start, packing.cu_seqlens[n + 1]):
            delta_HV = p.v_[t] - torch.einsum("hkv,hk->hv", s_HKV, p.k_[t])
            write_HKV = (p.beta_[t][:, None] * p.k_[t])[..., None] * delta_HV[:, None, :]
            s_HKV = p.g_[t].exp()[..., None] * s_HKV + write_HKV
            outputs.append(torch.einsum("hkv,hk->hv", s_HKV, p.q_[t]))
        states.append(s_HKV)
    return kda.KDAOut(torch.stack(outputs), torch.stack(states))


def one_document_a_row(x: dict[str, Any]) -> Packing:
    return Packing.of(x["packing"].lengths)


def without_state(out: Any, packing: Packing, **_: Any) -> Any:
    return out if packing.segment_BL is None else type(out)(out[0], None)


def leaking(op: str) -> Fault:
    """Documents in a row see each other."""
    run = fed(op, "", packing=one_document_a_row).run
    return Fault(op, "leaks_documents", lambda **x: without_state(run(**x), **x))


def kda_faults() -> list[Fault]:
    op = "kda_chunk"
    return [
        prepared("query_unscaled", lambda p, q, *_: p._replace(q_=p.q_ * q.shape[-1] ** 0.5)),
        prepared("query_scaled_by_value_width", lambda p, q, k, v, *_: p._replace(
            q_=p.q_ * (q.shape[-1] / v.shape[-1]) ** 0.5)),
        prepared("key_as_it_is", lambda p, q, k, *_: p._replace(k_=k.to(p.k_.dtype))),
        prepared("value_normalised", lambda p, *_: p._replace(v_=kda.l2_norm(p.v_))),
        prepared("beta_not_squashed", lambda p, q, k, v, z, b, *_: p._replace(beta_=b)),
        prepared("beta_doubled", lambda p, *_: p._replace(beta_=2 * p.beta_)),
        prepared("decay_of_half_the_rate", lambda p, *_: p._replace(g_=p.g_ / 2)),
        prepared("no_dt_bias", lambda p, q, k, v, z, b, A, dt, bound: p._replace(
            g_=kda.gate(z, A, bound))),
        normalised("l2_without_eps", lambda x: x * squares(x).rsqrt()),
        normalised("l2_eps_outside_the_root", lambda x: x / (squares(x).sqrt() + 1e-6)),
        normalised("l2_eps_on_the_mean", lambda x: x * (squares(x) + 1e-6 * x.shape[-1]).rsqrt()),
        normalised("l2_eps_of_the_norms", lambda x: x * (squares(x) + 1e-5).rsqrt()),
        normalised("l2_clamped", lambda x: nn.functional.normalize(x, dim=-1, eps=1e-3)),
        gated("clamped_softplus", clamped_gate),
        gated("rate_not_exponentiated", raw_rate),
        gated("bound_is_always_five", always_five),
        gated("rate_after_the_sigmoid", rate_after_sigmoid),
        Fault(op, "undecayed_delta", undecayed_delta),
        inside(op, "diagonal_left_out", torch.Tensor, "__ge__", torch.Tensor.__gt__),
        leaking(op),
        fed(op, "state_forgotten", state_NHKV=constant(None)),
        fed(op, "one_token_late", v_THV=lambda x: x["v_THV"].roll(1, 0)),
        returned(op, "state_transposed", lambda out, **_: out._replace(
            state_NHKV=None if out.state_NHKV is None else out.state_NHKV.mT)),
        returned(op, "previous_output", lambda out, **_: out._replace(
            o_THV=out.o_THV.roll(1, 0))),
    ]  # fmt: skip


def window_rolled(out: conv.ConvOut, **_: Any) -> conv.ConvOut:
    return out._replace(window_NWC=None if out.window_NWC is None else out.window_NWC.flip(1))


def conv_faults() -> list[Fault]:
    return [
        leaking("causal_conv"),
        fed("causal_conv", "taps_reversed", weight_CW=lambda x: x["weight_CW"].flip(1)),
        fed("causal_conv", "window_forgotten", window_NWC=constant(None)),
        fed("causal_conv", "sees_the_next_token", x_TC=lambda x: x["x_TC"].roll(-1, 0)),
        returned("causal_conv", "window_newest_first", window_rolled),
        inside("causal_conv", "no_silu", nn.functional, "silu", lambda x: x),
    ]


def step_faults() -> list[Fault]:
    op = "kda_step"

    def padding_is_a_slot(x: dict[str, Any]) -> Tensor:
        return x["slot_N"] % x["state_SHKV"].shape[0]

    def all_kept(x: dict[str, Any]) -> Tensor | None:
        return None

    return [
        fed(op, "state_not_kept", state_SHKV=lambda x: x["state_SHKV"].clone()),
        fed(op, "window_not_kept", window_SWC=lambda x: x["window_SWC"].clone()),
        fed(op, "slots_in_order", slot_N=lambda x: torch.arange(len(x["slot_N"]))),
        fed(op, "padding_is_a_slot", slot_N=padding_is_a_slot),
        fed(op, "rejected_drafts_kept", keep_N=all_kept),
        fed(op, "eps_dropped", eps=constant(0.0)),
        fed(op, "gate_unbounded", lower_bound=constant(None)),
        fed(op, "taps_reversed", conv_CW=lambda x: x["conv_CW"].flip(1)),
        fed(op, "gates_of_the_next_token", gate_THV=lambda x: x["gate_THV"].roll(1, 0)),
        inside(op, "no_silu", nn.functional, "silu", lambda x: x),
    ]


def norm_faults(op: str) -> list[Fault]:
    def outside(out: Tensor, x_D: Tensor, eps: float, **_: Any) -> Tensor:
        mean = x_D.square().mean(-1, keepdim=True)
        return out * (mean + eps).sqrt() / (mean.sqrt() + eps)

    return [
        fed(op, "eps_dropped", eps=constant(0.0)),
        fed(op, "eps_of_the_other_norms", eps=constant(1.1e-5)),
        fed(op, "eps_on_the_sum", eps=lambda x: x["eps"] / x["x_D"].shape[-1]),
        returned(op, "eps_outside_the_root", outside),
        fed(op, "weight_forgotten", weight_D=lambda x: torch.ones_like(x["weight_D"])),
        fed(op, "one_plus_weight", weight_D=lambda x: 1 + x["weight_D"]),
        fed(op, "mean_subtracted", x_D=lambda x: x["x_D"] - x["x_D"].mean(-1, keepdim=True)),
        returned(op, "sum_for_mean", lambda out, x_D, **_: out * x_D.shape[-1] ** -0.5),
        Fault(op, "weight_without_gradient", lambda **x: reference(op)(
            **x | {"weight_D": x["weight_D"].detach()})),
    ]  # fmt: skip


def gate_before_norm(x_D: Tensor, gate_D: Tensor, weight_D: Tensor, eps: float) -> Tensor:
    return rms_norm(x_D * torch.sigmoid(gate_D), weight_D, eps)


def mixes_normalised(partial_TD: Tensor, blocks_NTD: Tensor, query_D: Tensor, eps: float,
                     update_TD: Tensor | None = None, **x: Any) -> Any:  # fmt: skip
    total = partial_TD if update_TD is None else partial_TD + update_TD
    unit = torch.ones_like(query_D)
    sources = [rms_norm(v, unit, eps) for v in (total, blocks_NTD)]
    out = reference("attn_res")(*sources, query_D, eps, **x)
    return out._replace(partial_TD=None if update_TD is None else total)


def reads_the_sum_before(update_TD: Tensor | None = None, **x: Any) -> Any:
    """The update is in the new sum, and not yet in the mixture."""
    out = reference("attn_res")(**x)
    return out if update_TD is None else out._replace(partial_TD=x["partial_TD"] + update_TD)


def raw_softmax(x: Tensor, dim: int) -> Tensor:
    return x.exp() / x.exp().sum(dim, keepdim=True)


def attn_res_faults() -> list[Fault]:
    op, query, partial, blocks = "attn_res", "query_D", "partial_TD", "blocks_NTD"
    return [
        fed(op, "eps_dropped", eps=constant(0.0)),
        fed(op, "eps_of_the_latent_norms", eps=constant(1e-6)),
        fed(op, "eps_on_the_sum", eps=lambda x: x["eps"] / x[query].shape[0]),
        fed(op, "eps_of_the_sources_after", norm_eps=lambda x: x["eps"]),
        fed(op, "scaled_scores", query_D=lambda x: x[query] * x[query].shape[0] ** -0.5),
        fed(op, "uniform_mix", query_D=lambda x: 0 * x[query]),
        fed(op, "newest_block_left_out", blocks_NTD=lambda x: x[blocks][:-1]),
        fed(op, "zero_source_added", blocks_NTD=lambda x: torch.cat(
            [x[blocks], 0 * x[partial][None]])),
        fed(op, "update_forgotten", update_TD=lambda x: (
            0 * x["update_TD"] if "update_TD" in x else None)),
        fed(op, "norm_forgotten", weight_D=constant(None)),
        returned(op, "identity_stream_added", lambda out, partial_TD, **_: out._replace(
            h_TD=out.h_TD + partial_TD)),
        Fault(op, "reads_the_sum_before", reads_the_sum_before),
        Fault(op, "mixes_normalised", mixes_normalised),
        inside(op, "softmax_without_maximum", torch, "softmax", raw_softmax),
    ]  # fmt: skip


def higher_index_wins(*, logits_TE: Tensor, bias_E: Tensor, **x: Any) -> Routes:
    routes = route(logits_TE.flip(1), bias_E.flip(0), **x)
    last = logits_TE.shape[1] - 1
    return routes._replace(expert_TR=last - routes.expert_TR)


def reweighted(weigh: Callable[..., Tensor]) -> Callable[..., Routes]:
    def change(out: Routes, **x: Any) -> Routes:
        return out._replace(weight_TR=weigh(out, **x))

    return change


def chosen_scores(out: Routes, logits_TE: Tensor) -> Tensor:
    return torch.sigmoid(logits_TE).gather(-1, out.expert_TR)


def biased_weights(
    out: Routes, logits_TE: Tensor, bias_E: Tensor, scale: float, **_: Any
) -> Tensor:
    chosen = chosen_scores(out, logits_TE) + bias_E[out.expert_TR]
    return chosen / chosen.sum(-1, keepdim=True) * scale


def without_eps(
    out: Routes, logits_TE: Tensor, scale: float, renormalize: bool, **_: Any
) -> Tensor:
    shares = chosen_scores(out, logits_TE)
    return scale * (shares / shares.sum(-1, keepdim=True) if renormalize else shares)


def constant_total(
    out: Routes, logits_TE: Tensor, scale: float, renormalize: bool, **_: Any
) -> Tensor:
    shares = chosen_scores(out, logits_TE)
    total = (shares.sum(-1, keepdim=True) + 1e-20).detach()
    return scale * (shares / total if renormalize else shares)


def softmax_weights(out: Routes, logits_TE: Tensor, scale: float, **_: Any) -> Tensor:
    return torch.softmax(logits_TE.gather(-1, out.expert_TR), -1) * scale


def over_all_experts(out: Routes, logits_TE: Tensor, scale: float, **_: Any) -> Tensor:
    total = torch.sigmoid(logits_TE).sum(-1, keepdim=True)
    return chosen_scores(out, logits_TE) / total * scale


def router_faults() -> list[Fault]:
    op = "router"
    return [
        Fault(op, "higher_index_wins", higher_index_wins),
        returned(op, "biased_weights", reweighted(biased_weights)),
        returned(op, "renormalised_without_eps", reweighted(without_eps)),
        returned(op, "softmax_weights", reweighted(softmax_weights)),
        returned(op, "renormalised_over_all", reweighted(over_all_experts)),
        returned(op, "total_without_gradient", reweighted(constant_total)),
        returned(op, "worst_first", lambda out, **_: Routes(
            out.expert_TR.flip(1), out.weight_TR.flip(1))),
        fed(op, "bias_ignored", bias_E=lambda x: 0 * x["bias_E"]),
        fed(op, "padding_counted", is_counted_T=constant(None)),
        fed(op, "scale_forgotten", scale=constant(1.0)),
        fed(op, "never_renormalised", renormalize=constant(False)),
        fed(op, "always_renormalised", renormalize=constant(True)),
        inside(op, "bias_added_to_logits", torch, "sigmoid", lambda x: x),
    ]  # fmt: skip


def later_tokens_first(*, expert_TR: Tensor, num_experts: int) -> Permutation:
    """Within an expert the last pair stands in front."""
    p = expert_TR.numel()
    turned = permute(expert_TR.flip(0, 1), num_experts)
    pair_P = torch.where(turned.pair_P < 0, -1, p - 1 - turned.pair_P)
    return turned._replace(pair_P=pair_P, place_TR=turned.place_TR.flip(0, 1))


def permute_faults() -> list[Fault]:
    op = "permute"
    return [
        Fault(op, "later_tokens_first", later_tokens_first),
        fed(op, "nobodys_are_the_first_expert_s", expert_TR=lambda x: x["expert_TR"].clamp(min=0)),
        returned(op, "inverse_for_forward", lambda out, **_: out._replace(
            pair_P=out.place_TR.flatten(), place_TR=out.pair_P.view(out.place_TR.shape))),
        returned(op, "ends_for_starts", lambda out, **_: out._replace(
            start_E=out.start_E.roll(-1))),
    ]  # fmt: skip


def weights_before_w2(**x: Any) -> Tensor:
    """The weights on the input of an expert, not on its output."""
    columns = []
    for r in range(x["expert_TR"].shape[1]):
        one = {
            "expert_TR": x["expert_TR"][:, r, None],
            "x_TL": x["x_TL"] * x["weight_TR"][:, r, None],
        }
        ones = torch.ones_like(x["weight_TR"][:, r, None])
        columns.append(reference("experts")(**x | one | {"weight_TR": ones}))
    return torch.stack(columns).sum(0)


def swapped_halves(weight: Tensor) -> Tensor:
    return torch.cat(weight.chunk(2, dim=1)[::-1], dim=1)


def expert_faults() -> list[Fault]:
    op = "experts"
    return [
        Fault(op, "weights_before_w2", weights_before_w2),
        fed(op, "up_before_gate", w13_E2IL=lambda x: swapped_halves(x["w13_E2IL"])),
        fed(op, "unweighted", weight_TR=lambda x: torch.ones_like(x["weight_TR"])),
        fed(op, "first_choice_only", weight_TR=lambda x: x["weight_TR"] * torch.eye(2)[0, : x[
            "weight_TR"].shape[1]]),
        fed(op, "gate_uncapped", beta=constant(None)),
        fed(op, "neighbour_s_down_projection", w2_ELI=lambda x: 0.5 * (
            x["w2_ELI"] + x["w2_ELI"].flip(0).flip(1))),
    ]  # fmt: skip


def rolled_words(tiles: Tensor) -> Tensor:
    """Codes one word further, beside scales that stay."""
    words, scales = tiles[..., :1024], tiles[..., 1024:]
    return torch.cat([words.roll(1, -1), scales], -1)


def packed_expert_faults() -> list[Fault]:
    op = "experts_mxfp4"
    return [
        fed(op, "codes_in_other_columns", w13_EMKW=lambda x: rolled_words(x["w13_EMKW"])),
        fed(op, "scale_off_by_one", w2_EMKW=lambda x: torch.cat([
            x["w2_EMKW"][..., :1024], x["w2_EMKW"][..., 1024:] + 0x01010101], -1)),
        fed(op, "unweighted", weight_TR=lambda x: torch.ones_like(x["weight_TR"])),
        fed(op, "gate_uncapped", beta=constant(None)),
    ]  # fmt: skip


def sees_the_future(*, packing: Packing, **x: Any) -> Tensor:
    """The second token of a sequence stands where the first one should."""
    return mla_prefill(packing=packing, **x | {"k_SHN": x["k_SHN"].roll(-1, 0)})


def front_lost(*, packing: Packing, keys: Packing | None = None, **x: Any) -> Tensor:
    """Queries are taken for the first tokens of their sequence."""
    if keys is None:
        return mla_prefill(packing=packing, **x)
    kept = [
        at
        for end, length in zip(keys.cu_seqlens[1:], packing.lengths, strict=True)
        for at in range(end - length, end)
    ]
    return mla_prefill(
        packing=packing, **x | {name: x[name][kept] for name in ("k_SHN", "shared_SR", "v_SHV")}
    )


def mla_decoded(name: str, scores: Callable[..., Tensor], values: Callable[..., Tensor]) -> Fault:
    def decoded(
        q_QHC: Tensor, latent_SC: Tensor, back_S: Tensor, kv_lora_rank: int, scale: float
    ) -> Tensor:
        p_QHS = torch.softmax(scores(q_QHC, latent_SC, kv_lora_rank) * scale, dim=-1)
        return p_QHS @ values(latent_SC, kv_lora_rank)

    return inside("mla_decode", name, mla, "_decoded", decoded)


decoded = mla._decoded


def later_tokens_seen(
    q_QHC: Tensor, latent_SC: Tensor, back_S: Tensor, kv_lora_rank: int, scale: float
) -> Tensor:
    return decoded(q_QHC, latent_SC, back_S + len(q_QHC), kv_lora_rank, scale)


def mla_faults() -> list[Fault]:
    prefill, decode = "mla_prefill", "mla_decode"
    return [
        fed(prefill, "leaks_documents", packing=one_document_a_row),
        fed(prefill, "unscaled", scale=constant(1.0)),
        fed(prefill, "scaled_by_value_width", scale=lambda x: x["v_SHV"].shape[-1] ** -0.5),
        fed(prefill, "sequences_joined", packing=lambda x: Packing.of([x["packing"].num_tokens])),
        Fault(prefill, "sees_the_future", sees_the_future),
        fed(prefill, "one_key_for_all_heads", k_SHN=lambda x: x["k_SHN"][:, :1].expand(-1, 3, -1)),
        fed(prefill, "no_shared_channels", shared_SR=lambda x: 0 * x["shared_SR"]),
        Fault(prefill, "keys_in_front_lost", front_lost),
        mla_decoded("mixes_last_channels", lambda q, c, r: q @ c.t(), lambda c, r: c[:, -r:]),
        mla_decoded("latent_scores_only", lambda q, c, r: q[..., :r] @ c[:, :r].t(), lambda c, r: (
            c[:, :r])),
        fed(decode, "unscaled", scale=constant(1.0)),
        fed(decode, "first_rows_lost", latent_PSC=lambda x: x["latent_PSC"] * (
            torch.arange(x["latent_PSC"].shape[1])[:, None] > 0)),
        fed(decode, "pages_in_order", table_NW=lambda x: x["table_NW"].sort(dim=1).values),
        fed(decode, "first_page_for_all", table_NW=lambda x: x["table_NW"][:, :1].expand_as(
            x["table_NW"])),
        fed(decode, "a_token_too_few", length_N=lambda x: (x["length_N"] - 1).clamp(min=1)),
        fed(decode, "rates_forgotten", rate_PS=lambda x: (
            torch.ones_like(x["rate_PS"]) if "rate_PS" in x else None)),
        inside(decode, "later_tokens_seen", mla, "_decoded", later_tokens_seen),
        inside(decode, "softmax_without_maximum", torch, "softmax", raw_softmax),
    ]  # fmt: skip


def sigmoid_of_capped(gate_up_2I: Tensor, beta: float | None, linear_beta: float | None) -> Tensor:
    gate, up = gate_up_2I.chunk(2, dim=-1)
    capped = gate if beta is None else beta * torch.tanh(gate / beta)
    both = torch.cat([capped, up], dim=-1)
    return situ_glu(both, None, linear_beta)


def situ_faults() -> list[Fault]:
    op = "situ"
    return [
        Fault(op, "sigmoid_of_capped", sigmoid_of_capped),
        fed(op, "up_uncapped", linear_beta=constant(None)),
        fed(op, "gate_uncapped", beta=constant(None)),
        fed(op, "swi_glu_capped", beta=constant(4.0)),
        fed(op, "up_before_gate", gate_up_2I=lambda x: x["gate_up_2I"].roll(
            x["gate_up_2I"].shape[-1] // 2, -1)),
        inside(op, "no_sigmoid", torch, "sigmoid", torch.ones_like),
        inside(op, "clamp_for_tanh", torch, "tanh", lambda x: x.clamp(-1, 1)),
    ]  # fmt: skip


def sigmoid_gate_faults() -> list[Fault]:
    op = "sigmoid_gate"
    return [
        fed(op, "heads_in_another_order", o_THV=lambda x: x["o_THV"].flip(1)),
        fed(op, "gate_of_the_token_before", gate_TC=lambda x: x["gate_TC"].roll(1, 0)),
        inside(op, "no_sigmoid", torch, "sigmoid", torch.ones_like),
        inside(op, "tanh_for_sigmoid", torch, "sigmoid", torch.tanh),
    ]


def linear_faults(op: str) -> list[Fault]:
    return [
        fed(op, "rounded_to_bf16", x_TI=lambda x: x["x_TI"].bfloat16().float()),
        fed(op, "last_column_lost", x_TI=lambda x: x["x_TI"] * (
            torch.arange(x["x_TI"].shape[1]) < x["x_TI"].shape[1] - 1)),
    ]  # fmt: skip


FAULTS = [
    *linear_faults("linear"),
    *linear_faults("scores"),
    *kda_faults(),
    *conv_faults(),
    *step_faults(),
    *norm_faults("rms_norm"),
    *norm_faults("gated_rms_norm"),
    returned("gated_rms_norm", "silu_gate", lambda out, gate_D, **_: out * gate_D),
    fed("gated_rms_norm", "gate_ignored", gate_D=lambda x: 0 * x["gate_D"] + 100),
    Fault("gated_rms_norm", "gate_before_norm", gate_before_norm),
    *attn_res_faults(),
    *router_faults(),
    *permute_faults(),
    *expert_faults(),
    *packed_expert_faults(),
    *mla_faults(),
    *situ_faults(),
    *sigmoid_gate_faults(),
]


def planted(op: str, run: Run, monkeypatch, backend: str = "") -> registry.OpSpec:
    """Op `op` with `run` for its reference, or for one of its backends."""
    declared = spec(op)
    monkeypatch.setattr(
        implementation,
        "load_attr",
        lambda path: run if path == "planted:fault" else registry.load_attr(path),
    )
    if backend:
        return replace(declared, backends={backend: "planted:fault"})
    return replace(declared, reference="planted:fault", backends={})


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: f"{fault.op}-{fault.name}")
def test_a_planted_fault_is_caught(fault, monkeypatch):
    assert any(not r.passed for r in check(planted(fault.op, fault.run, monkeypatch)))


@pytest.mark.parametrize("op", OPS)
def test_every_op_has_planted_faults_and_passes_without_one(op, monkeypatch):
    assert sum(fault.op == op for fault in FAULTS) >= 2
    assert all(r.passed for r in check(planted(op, reference(op), monkeypatch)))


@pytest.mark.parametrize("op", [op for op in OPS if "cpu" in spec(op).backends])
def test_a_fault_in_a_cpu_backend_is_caught(op, monkeypatch):
    fault = next(fault for fault in FAULTS if fault.op == op)
    results = check(planted(op, fault.run, monkeypatch, backend="cpu"))
    assert {r.backend for r in results if not r.passed} == {"cpu"}


def test_a_surplus_output_is_caught(monkeypatch):
    def talkative(**x: Any) -> tuple[Tensor, Tensor]:
        return situ_glu(**x), x["gate_up_2I"]

    results = list(check(planted("situ", talkative, monkeypatch)))
    assert "output 1" in {r.what for r in results if r.error == math.inf}


def test_an_input_written_to_is_caught(monkeypatch):
    def untidy(**x: Any) -> Any:
        out = situ_glu(**x)
        if not torch.is_grad_enabled():
            x["gate_up_2I"].zero_()
        return out

    results = list(check(planted("situ", untidy, monkeypatch)))
    assert {r.what for r in results if not r.passed} == {"inference after gate_up_2I"}


def test_a_fault_on_the_inference_path_alone_is_caught(monkeypatch):
    def careless(**x: Any) -> Any:
        return reference("rms_norm")(**x) * (1 if torch.is_grad_enabled() else 1.001)

    results = list(check(planted("rms_norm", careless, monkeypatch)))
    assert {r.what for r in results if not r.passed} == {"inference output 0"}
