"""Triton's convolution and norms where the checks made from their declarations do not reach."""

from __future__ import annotations

import pytest
import torch

from perilune.kernels.causal_conv import oracle
from perilune.kernels.causal_conv import reference as conv_reference
from perilune.kernels.causal_conv import triton as conv
from perilune.kernels.causal_conv.triton_runs import run_length, runs
from perilune.kernels.common.packing import Packing
from perilune.kernels.norm import reference as norm_reference
from perilune.kernels.norm import triton as norm
from perilune.kernels.norm.triton_rows import rows_of

CPU = torch.device("cpu")


def drawn(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def gradients(op, *tensors, dtype=torch.float32):
    """Outputs of `op`, and the gradients of a random projection of them."""
    leaves = [x.detach().to(dtype).requires_grad_() for x in tensors]
    outputs = op(*leaves)
    loss = sum((x * drawn(*x.shape, seed=7).to(x.dtype)).sum() for x in outputs)
    return [*outputs, *torch.autograd.grad(loss, leaves)]


def close(got, want):
    return all(torch.allclose(a.double(), b.double(), rtol=1e-5, atol=1e-5) for a, b in zip(
        got, want, strict=True))  # fmt: skip


def convolution(op, lengths):
    return lambda x, w, window: op(x, w, Packing(lengths=lengths), window)


@pytest.mark.parametrize("lengths", [(50,), (17, 1, 35), (3, 0, 20), (0, 2)])
def test_walks_of_several_runs_and_none_at_all(lengths):
    inputs = drawn(sum(lengths), 5), drawn(5, 4), drawn(len(lengths), 3, 5)
    got = gradients(convolution(conv.causal_conv, lengths), *inputs)
    want = gradients(convolution(oracle.causal_conv, lengths), *inputs, dtype=torch.float64)
    assert close(got, want)


def test_a_single_tap_needs_no_window():
    inputs = drawn(9, 5), drawn(5, 1), drawn(2, 0, 5)
    got = gradients(convolution(conv.causal_conv, (4, 5)), *inputs)
    assert close(got, gradients(convolution(conv_reference.causal_conv, (4, 5)), *inputs))


def test_unused_windows_ask_for_no_gradient():
    x, w = drawn(20, 5).requires_grad_(), drawn(5, 4).requires_grad_()
    conv.causal_conv(x, w, Packing.of((20,))).y_TC.sum().backward()
    want = [x.grad, w.grad]
    x.grad = w.grad = None
    oracle.causal_conv(x, w, Packing.of((20,))).y_TC.sum().backward()
    assert close([x.grad, w.grad], want)


def test_weights_gradients_are_the_same_bits_every_time():
    inputs = drawn(70, 5), drawn(5, 4), drawn(1, 3, 5)
    first, second = (
        gradients(convolution(conv.causal_conv, (70,)), *inputs, dtype=torch.float32)
        for _ in range(2)
    )
    assert all(map(torch.equal, first, second))
    inputs = drawn(600, 3, 16), drawn(600, 3, 16), drawn(16)
    first, second = (
        gradients(lambda *x: (norm.gated_rms_norm(*x, 1e-5),), *inputs) for _ in range(2)
    )
    assert all(map(torch.equal, first, second))


def test_a_slice_of_a_projection_is_not_copied():
    fused_TC = drawn(6, 24)
    x_TC = fused_TC[:, 4:10]
    assert conv.row_major(x_TC) is x_TC
    gate = rows_of(fused_TC[:, 8:].view(6, 2, 8))
    assert gate.x_D.data_ptr() == fused_TC[:, 8:].data_ptr()
    assert (gate.outer, gate.inner) == (24, 8)


@pytest.mark.parametrize("heads", [1, 2, 3])
def test_gates_out_of_a_wide_projection(heads):
    def gated(op):
        def run(x, fused, w):
            gate = fused[:, 5 : 5 + heads * 16].view(-1, heads, 16)
            return (op(x, gate, w, 1e-5),)

        return run

    inputs = drawn(40, heads, 16), drawn(40, 7 + heads * 16), drawn(16)
    got = gradients(gated(norm.gated_rms_norm), *inputs)
    assert close(got, gradients(gated(norm_reference.gated_rms_norm), *inputs))


def test_rows_of_a_token_alone_and_no_row_at_all():
    w = drawn(8)
    one = drawn(8)
    assert close([norm.rms_norm(one, w, 1e-5)], [norm_reference.rms_norm(one, w, 1e-5)])
    got = gradients(lambda x, w: (norm.rms_norm(x, w, 1e-5),), drawn(0, 8), w)
    assert got[0].shape == (0, 8)
    assert torch.equal(got[2], torch.zeros(8))


def test_fp64_and_rows_too_wide_run_the_reference():
    x, w = drawn(3, 40).double(), drawn(40).double()
    assert torch.equal(norm.rms_norm(x, w, 1e-5), norm_reference.rms_norm(x, w, 1e-5))
    wide = drawn(2, 16385)
    ones = torch.ones(16385)
    assert torch.equal(norm.rms_norm(wide, ones, 1e-5), norm_reference.rms_norm(wide, ones, 1e-5))
    taps, packing = drawn(40, 4).double(), Packing.of((3,))
    got, want = (op.causal_conv(x, taps, packing).y_TC for op in (conv, conv_reference))
    assert torch.equal(got, want)


@pytest.mark.parametrize("length", [16, 64])
def test_runs_hold_every_token_once(length):
    lengths = (130, 1, 0, 64, 63)
    seen = []
    for start, first, end, n in runs(lengths, length, CPU).tolist():
        assert (first, end) == (sum(lengths[:n]), sum(lengths[: n + 1]))
        seen += range(start, min(start + length, end))
    assert seen == [*range(sum(lengths))]
    assert sum(n == 2 for *_, n in runs(lengths, length, CPU).tolist()) == 1


def test_runs_shorten_until_there_are_enough_programs():
    assert run_length(8192, 288, 256) == 256
    assert run_length(8192, 8, 256) == 64
    assert run_length(1, 1, 256) == 16
