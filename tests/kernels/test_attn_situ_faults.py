"""Faults planted in Triton's AttnRes read and GLU: each turns a check red."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from triton_faults import Fault, plant, red

from perilune.kernels.attn_res import triton as attn
from perilune.kernels.situ import triton as situ


def with_eps(eps: float):
    return lambda run: lambda sources, query, _: run(sources, query, eps)


def last_source_lost(run):
    return lambda sources, *x: run(sources[:-1], *x)


def values_normalised(run):
    def wrong(sources, query, eps):
        unit = sources * torch.rsqrt(sources.square().mean(-1, keepdim=True) + eps)
        return run(unit.to(sources.dtype), query, 0.0)

    return wrong


def scaled_by_width(run):
    return lambda sources, query, eps: run(sources, query * query.shape[0] ** -0.5, eps)


def shares_are_constants(run):
    """The gradient of the mixture alone, as though no score depended on a source."""

    def wrong(sources, query, stats, dh):
        found = run(sources, query, stats, dh)
        p_NT = torch.exp2(stats[1 : 1 + sources.shape[0]] - stats[0])
        return found._replace(sources_NTD=(p_NT[..., None] * dh).to(sources.dtype))

    return wrong


def mean_forgotten(run):
    """ds = p dh . v."""

    def wrong(sources, query, stats, dh):
        n = sources.shape[0]
        p_NT, r_NT = torch.exp2(stats[1 : 1 + n] - stats[0]), stats[1 + n :]
        ds_NT = p_NT * (dh * sources).sum(-1)
        dq_D = ((ds_NT * r_NT)[..., None] * sources).sum((0, 1))
        return run(sources, query, stats, dh)._replace(query_D=dq_D)

    return wrong


def one_token_counts(run):
    def wrong(sources, query, stats, dh):
        part = run(sources[:, :1], query, stats[:, :1].contiguous(), dh[:1])
        return run(sources, query, stats, dh)._replace(query_D=part.query_D)

    return wrong


def norm_is_a_constant(run):
    """The source's own norm is not differentiated."""

    def wrong(sources, query, stats, dh):
        n, d = sources.shape[0], sources.shape[-1]
        p_NT, r_NT = torch.exp2(stats[1 : 1 + n] - stats[0]), stats[1 + n :]
        dp_NT = (dh * sources).sum(-1)
        ds_NT = p_NT * (dp_NT - (p_NT * dp_NT).sum(0))
        score_NT = (sources * query).sum(-1) * r_NT
        found = run(sources, query, stats, dh)
        extra = (ds_NT * score_NT * r_NT.square() / d)[..., None] * sources
        return found._replace(sources_NTD=found.sources_NTD + extra.to(sources.dtype))

    return wrong


def contiguous_assumed(run):
    def wrong(x):
        rows = run(x)
        return rows.as_strided(rows.shape, torch.empty(rows.shape).stride(), rows.storage_offset())

    return wrong


def caps_changed(beta: Callable[..., Any], linear: Callable[..., Any]):
    return lambda run: lambda x, b, lb, *rest: run(x, beta(b), linear(lb), *rest)


def clamped(run):
    """linear_beta as a bound of a straight line."""

    def wrong(x, beta, linear_beta):
        gate, up = x.chunk(2, -1)
        up = up if linear_beta is None else up.clamp(-linear_beta, linear_beta)
        return run(torch.cat([gate, up], -1), beta, None)

    return wrong


def branches_swapped(run):
    return lambda x, *caps: run(x.roll(x.shape[-1] // 2, -1), *caps)


def gradients_swapped(run):
    return lambda x, *rest: run(x, *rest).roll(x.shape[-1] // 2, -1)


def keep(x):
    return x


def drop(_):
    return None


READ, GLU = "attn_res", "situ"
FAULTS = [
    Fault("eps ignored", READ, attn, "forward", with_eps(0.0), "as_small_as_eps"),
    Fault("last source lost", READ, attn, "forward", last_source_lost, "nine_sources"),
    Fault("values normalised", READ, attn, "forward", values_normalised, "nine_sources"),
    Fault("divided by sqrt(D)", READ, attn, "forward", scaled_by_width, "nine_sources"),
    Fault("shares constant", READ, attn, "backward", shares_are_constants, "nine_sources"),
    Fault("mean forgotten", READ, attn, "backward", mean_forgotten, "nine_sources"),
    Fault("one token's query", READ, attn, "backward", one_token_counts, "nine_sources"),
    Fault("norm constant", READ, attn, "backward", norm_is_a_constant, "nine_sources"),
    Fault("contiguous assumed", READ, attn, "rows", contiguous_assumed),
    Fault("gate uncapped", GLU, situ, "forward", caps_changed(drop, keep), "saturated"),
    Fault("up uncapped", GLU, situ, "forward", caps_changed(keep, drop), "saturated"),
    Fault("up clamped", GLU, situ, "forward", clamped, "saturated"),
    Fault("branches swapped", GLU, situ, "forward", branches_swapped, "small"),
    Fault("gate uncapped back", GLU, situ, "backward", caps_changed(drop, keep), "saturated"),
    Fault("up uncapped back", GLU, situ, "backward", caps_changed(keep, drop), "saturated"),
    Fault("gradients swapped", GLU, situ, "backward", gradients_swapped, "swi_glu"),
    Fault("contiguous assumed", GLU, situ, "_rows", contiguous_assumed),
]


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: f"{fault.op} {fault.name}")
def test_a_fault_is_found(fault, monkeypatch):
    assert red(fault.op, fault.case) == []
    plant(fault, monkeypatch)
    assert red(fault.op, fault.case) != []
