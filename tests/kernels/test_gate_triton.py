"""Triton's sigmoid gate: layouts, sizes, and faults planted in it that turn a check red."""

from __future__ import annotations

import pytest
import torch
from triton_faults import Fault, plant, plant_in_source, red

from perilune.kernels.gate import reference, triton, triton_kernels


def drawn(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def gradients(op, o_THV, gate_TC):
    leaves = [x.detach().requires_grad_() for x in (o_THV, gate_TC)]
    y_TC = op(*leaves)
    return [y_TC.detach(), *torch.autograd.grad(y_TC, leaves, drawn(*y_TC.shape, seed=7))]


@pytest.mark.parametrize(("t", "h", "v"), [(1, 96, 128), (3, 5, 7), (2, 1, 1100), (0, 2, 4)])
def test_any_number_of_tokens_and_heads(t, h, v):
    inputs = drawn(t, h, v), drawn(t, h * v, seed=1)
    got, want = gradients(triton.sigmoid_gate, *inputs), gradients(reference.sigmoid_gate, *inputs)
    torch.testing.assert_close(got, want, atol=1e-6, rtol=2e-6)


def test_heads_one_behind_the_other_and_a_slice_of_a_projection_are_read_where_they_are(
    monkeypatch,
):
    o_HTV, fused = drawn(3, 4, 8), drawn(4, 60, seed=1)
    o_THV, gate_TC = o_HTV.transpose(0, 1), fused[:, 5:29]
    read = []
    monkeypatch.setattr(triton, "forward", lambda *x: read.extend(x) or triton_kernels.forward(*x))
    got = gradients(triton.sigmoid_gate, o_THV, gate_TC)
    want = gradients(reference.sigmoid_gate, o_THV.contiguous(), gate_TC.contiguous())
    torch.testing.assert_close(got, want, atol=1e-6, rtol=2e-6)
    assert [x.data_ptr() for x in read] == [o_HTV.data_ptr(), gate_TC.data_ptr()]


def test_fp64_is_the_references():
    inputs = drawn(2, 3, 4).double(), drawn(2, 12).double()
    assert torch.equal(triton.sigmoid_gate(*inputs), reference.sigmoid_gate(*inputs))


def contiguous_assumed(run):
    def wrong(x):
        rows = run(x)
        return rows.as_strided(rows.shape, torch.empty(rows.shape).stride(), rows.storage_offset())

    return wrong


def gradients_swapped(run):
    def wrong(o_THV, gate_TC, dy_TC):
        do_THV, dgate_TC = run(o_THV, gate_TC, dy_TC)
        return dgate_TC.view(o_THV.shape), do_THV.reshape(gate_TC.shape)

    return wrong


FAULTS = [
    Fault("contiguous assumed", "sigmoid_gate", triton, "row_major", contiguous_assumed),
    Fault("gradients swapped", "sigmoid_gate", triton, "backward", gradients_swapped, "small"),
]


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.name)
def test_a_fault_is_found(fault, monkeypatch):
    assert red(fault.op, fault.case) == []
    plant(fault, monkeypatch)
    assert red(fault.op, fault.case) != []


IN_SOURCE = {
    "heads one beside the other": ("* head_stride + (c_C % V)", "* V + (c_C % V)", "by_head"),
    "one head for all": ("(c_C // V)", "(c_C // C)", "small"),
    "rows of the gate packed": ("m_M1 * gate_stride", "m_M1 * C", ""),
    "last channels lost": ("C + BC - 1) // BC", "C // BC + (C < BC))", "beyond_a_tile"),
    "tanh for the sigmoid": (
        "y = o * sigmoid(gate, PTX)", "y = o * (2.0 * sigmoid(2.0 * gate, PTX) - 1.0)", "small"
    ),
    "slope of the sigmoid": ("s * (1.0 - s)", "s", "small"),
    "rows of gradients": ("out_MC = m_M1 * C + c_1C", "out_MC = m_M1 * V + c_1C", "small"),
}  # fmt: skip


@pytest.mark.parametrize("name", IN_SOURCE)
def test_a_fault_in_the_source_is_found(name, tmp_path, monkeypatch):
    right, wrong, case = IN_SOURCE[name]
    assert red("sigmoid_gate", case) == []
    plant_in_source(triton_kernels, right, wrong, [triton], tmp_path, monkeypatch)
    assert red("sigmoid_gate", case) != []
