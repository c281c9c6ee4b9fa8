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
    return lambda run: lambda sources, query, _, *x, **k: run(sources, query, eps, *x, **k)


def with_norm_eps(eps: float):
    return lambda run: lambda *x, **k: run(*x[:-1], eps, **k)


def last_block_lost(run):
    return lambda sources, *x, **k: run([*sources[:-2], sources[-1], sources[-1]], *x, **k)


def values_normalised(run):
    def wrong(sources, query, eps, *x, **k):
        unit = [v * torch.rsqrt(v.square().mean(-1, keepdim=True) + eps) for v in sources]
        return run(unit, query, 0.0, *x, **k)

    return wrong


def scaled_by_width(run):
    return lambda sources, query, *x, **k: run(sources, query * query.shape[0] ** -0.5, *x, **k)


def update_read_later(run):
    """The update is in the new sum, and not yet in the mixture."""

    def wrong(sources, query, eps, update, *x, **k):
        found = run(sources, query, eps, None, *x, **k)
        return found._replace(partial_TD=sources[-1] + update)

    return wrong


def shares(stats, m):
    return torch.exp2(stats[1 : 1 + m] - stats[0])


def shares_are_constants(run):
    """The gradient of the mixture alone, as though no score depended on a source."""

    def wrong(sources, query, weight, stats, dh, dpartial, dsources):
        found = run(sources, query, weight, stats, dh, dpartial, dsources)
        for p_T, dv in zip(shares(stats, len(sources)), dsources, strict=True):
            dv.copy_(p_T[:, None] * dh)
        return found

    return wrong


def mean_forgotten(run):
    """ds = p dh . v."""

    def wrong(sources, query, weight, stats, dh, *x):
        m, v_MTD = len(sources), torch.stack(list(sources))
        ds_MT = shares(stats, m) * (dh * v_MTD).sum(-1)
        dq_D = ((ds_MT * stats[1 + m : 1 + 2 * m])[..., None] * v_MTD).sum((0, 1))
        return run(sources, query, weight, stats, dh, *x)._replace(query_D=dq_D)

    return wrong


def one_token_counts(run):
    """Of the gradients of what all tokens share."""

    def wrong(sources, query, weight, stats, dh, dpartial, dsources):
        run(sources, query, weight, stats, dh, dpartial, dsources)
        one = [[x[:1] for x in sources], query, weight, stats[:, :1].contiguous(), dh[:1]]
        return run(*one, None, [torch.empty_like(x[:1]) for x in dsources])

    return wrong


def norm_is_a_constant(run):
    """The source's own norm is not differentiated."""

    def wrong(sources, query, weight, stats, dh, dpartial, dsources):
        m, v_MTD = len(sources), torch.stack(list(sources))
        p_MT, r_MT = shares(stats, m), stats[1 + m : 1 + 2 * m]
        dp_MT = (dh * v_MTD).sum(-1)
        ds_MT = p_MT * (dp_MT - (p_MT * dp_MT).sum(0))
        fall_MT = ds_MT * (v_MTD * query).sum(-1) * r_MT**3 / v_MTD.shape[-1]
        found = run(sources, query, weight, stats, dh, dpartial, dsources)
        for n, dv in enumerate(dsources):
            dv += fall_MT[n][:, None] * sources[n]
        return found

    return wrong


def norm_after_is_a_constant(run):
    """The mixture's norm scales, and is not differentiated."""

    def wrong(sources, query, weight, stats, dh, dpartial, dsources):
        found = run(sources, query, weight, stats, dh, dpartial, dsources)
        scaled = dh * weight * stats[-1][:, None]
        run(sources, query, None, stats, scaled, dpartial, dsources)
        return found

    return wrong


def others_forgotten(run):
    """What else the running sum is used for."""
    return lambda *x: run(*x[:5], None, x[6])


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
    Fault("norm's eps ignored", READ, attn, "forward", with_norm_eps(0.0), "as_small_as_eps"),
    Fault("last block lost", READ, attn, "forward", last_block_lost, "nine_sources"),
    Fault("values normalised", READ, attn, "forward", values_normalised, "nine_sources"),
    Fault("divided by sqrt(D)", READ, attn, "forward", scaled_by_width, "nine_sources"),
    Fault("update read later", READ, attn, "forward", update_read_later, "updated"),
    Fault("shares constant", READ, attn, "backward", shares_are_constants, "nine_sources"),
    Fault("mean forgotten", READ, attn, "backward", mean_forgotten, "nine_sources"),
    Fault("one token's query", READ, attn, "backward", one_token_counts, "nine_sources"),
    Fault("norm constant", READ, attn, "backward", norm_is_a_constant, "nine_sources"),
    Fault("one token's weight", READ, attn, "backward", one_token_counts, "one_source"),
    Fault("norm after constant", READ, attn, "backward", norm_after_is_a_constant, "normed"),
    Fault("others forgotten", READ, attn, "backward", others_forgotten, "updated"),
    Fault("contiguous assumed", READ, attn, "row_major", contiguous_assumed),
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
