"""Faults planted in Triton's convolution and norms: each turns a check red."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from triton_faults import Fault, plant, red

from perilune.kernels.causal_conv import triton as conv
from perilune.kernels.causal_conv import triton_backward as conv_backward
from perilune.kernels.causal_conv import triton_forward as conv_forward
from perilune.kernels.norm import triton as norm
from perilune.kernels.norm import triton_backward as norm_backward
from perilune.kernels.norm import triton_forward as norm_forward


def without(index: int) -> Callable[..., Callable[..., Any]]:
    """One operand is not seen."""
    return lambda run: lambda *x: run(*x[:index], None, *x[index + 1 :])


def oldest_tap_lost(run):
    return lambda x, w, *rest: run(x, torch.cat([0 * w[:, :1], w[:, 1:]], 1), *rest)


def sequences_joined(run):
    def table(*x):
        rows = run(*x).clone()
        rows[:, 1] = 0
        return rows

    return table


def last_run_lost(run):
    return lambda *x: run(*x)[:-1] if run(*x).shape[0] > 1 else run(*x)


def without_window_gradient(run):
    def wrong(*x):
        found = run(*x)
        return found._replace(window_NWC=0 * found.window_NWC)

    return wrong


def weights_of_half_the_tokens(run):
    def wrong(*x):
        dy = x[5].clone()
        dy[: dy.shape[0] // 2] = 0
        return run(*x)._replace(weight_CW=run(*x[:5], dy, *x[6:]).weight_CW)

    return wrong


def contiguous_assumed(run):
    return lambda x: x.as_strided(x.shape, (x.shape[1], 1), x.storage_offset())


def with_eps(eps: float):
    return lambda run: lambda x, gate, w, _, *rest: run(x, gate, w, eps, *rest)


def silu_gradient(run):
    """The gate's gradient as though the gate were itself a factor."""

    def wrong(x, gate, *rest):
        found = run(x, gate, *rest)
        return found._replace(gate_D=found.gate_D * gate.x_D)

    return wrong


def mean_forgotten(run):
    def wrong(x, gate, w, eps, dy):
        found = run(x, gate, w, eps, dy)
        n = x.x_D * torch.rsqrt(x.x_D.square().mean(-1, keepdim=True) + eps)
        r = torch.rsqrt(x.x_D.square().mean(-1, keepdim=True) + eps)
        dn = dy.x_D * w * (1 if gate is None else torch.sigmoid(gate.x_D))
        return found._replace(x_D=found.x_D + r * n * (dn * n).mean(-1, keepdim=True))

    return wrong


def groups_joined(run):
    return lambda rows, group: (group * rows.inner, rows.inner)


def one_program_counts(run):
    def wrong(x, gate, w, eps, dy):
        first = [None if r is None else r._replace(x_D=r.x_D[:1]) for r in (x, gate, dy)]
        part = run(first[0], first[1], w, eps, first[2])
        return run(x, gate, w, eps, dy)._replace(weight_D=part.weight_D)

    return wrong


CONV, GATED, PLAIN = "causal_conv", "gated_rms_norm", "rms_norm"
FAULTS = [
    Fault("window ignored", CONV, conv, "forward", without(2), "one_token"),
    Fault("documents leak", CONV, conv, "forward", without(3), "segmented_rows"),
    Fault("long documents leak", CONV, conv, "forward", without(3), "long_documents"),
    Fault("oldest tap lost", CONV, conv, "forward", oldest_tap_lost, "five_taps"),
    Fault("sequences joined", CONV, conv_forward, "runs", sequences_joined, "no_window"),
    Fault("run lost", CONV, conv_forward, "runs", last_run_lost, "shorter_than_window"),
    Fault("contiguous assumed", CONV, conv, "row_major", contiguous_assumed),
    Fault("documents leak back", CONV, conv, "backward", without(3), "segmented_rows"),
    Fault("last window alone", CONV, conv, "backward", without(6), "shorter_than_window"),
    Fault("no window gradient", CONV, conv, "backward", without_window_gradient, "one_token"),
    Fault("half the weight", CONV, conv, "backward", weights_of_half_the_tokens, "no_window"),
    Fault("joined back", CONV, conv_backward, "runs", sequences_joined, "no_window"),
    Fault("eps ignored", PLAIN, norm, "forward", with_eps(0.0), "as_small_as_eps"),
    Fault("eps ignored back", PLAIN, norm, "backward", with_eps(0.0), "as_small_as_eps"),
    Fault("mean forgotten", PLAIN, norm, "backward", mean_forgotten, "plain"),
    Fault("one row's weight", PLAIN, norm, "backward", one_program_counts, "plain"),
    Fault("gate ignored", GATED, norm, "forward", without(1), "per_head"),
    Fault("eps ignored", GATED, norm, "forward", with_eps(0.0), "as_small_as_eps"),
    Fault("silu gradient", GATED, norm, "backward", silu_gradient, "per_head"),
    Fault("mean forgotten", GATED, norm, "backward", mean_forgotten, "per_head"),
    Fault("one row's weight", GATED, norm, "backward", one_program_counts, "per_head"),
    Fault("groups joined", GATED, norm_forward, "strides", groups_joined),
]


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: f"{fault.op} {fault.name}")
def test_a_fault_is_found(fault, monkeypatch):
    assert red(fault.op, fault.case) == []
    plant(fault, monkeypatch)
    assert red(fault.op, fault.case) != []


def test_backward_reads_the_groups_as_forward_does():
    assert norm_backward.strides is norm_forward.strides
