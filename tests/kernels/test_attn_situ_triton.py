"""Triton's AttnRes read and GLU beyond what the checks draw: layouts, sizes, compiled graphs."""

from __future__ import annotations

import pytest
import torch

from perilune.kernels.attn_res import reference as attn_reference
from perilune.kernels.attn_res import triton as attn
from perilune.kernels.attn_res.triton_forward import Blocks, blocks, stages
from perilune.kernels.situ import reference as situ_reference
from perilune.kernels.situ import triton as situ
from perilune.kernels.situ.triton_forward import blocks as situ_blocks
from perilune.kernels.situ.triton_forward import is_rounded

CAPS = [(4.0, 25.0), (4.0, None), (None, 25.0), (None, None)]


def drawn(*shape, seed=0, scale=1.0):
    return scale * torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def gradients(op, *tensors):
    """The output of `op`, and the gradients of a random projection of it."""
    leaves = [x.detach().clone().requires_grad_() for x in tensors]
    y = op(*leaves)
    grads = torch.autograd.grad((y * drawn(*y.shape, seed=7).to(y.dtype)).sum(), leaves)
    return [y.detach(), *grads]


def close(got, want, tolerance=2e-6):
    norms = [((a - b).double().norm(), b.double().norm()) for a, b in zip(got, want, strict=True)]
    return all(error <= tolerance * size for error, size in norms)


def read(op):
    return lambda sources, query: op(sources, query, 1e-5)


@pytest.mark.parametrize("num_sources", [1, 2, 9, 12])
def test_any_number_of_sources(num_sources):
    inputs = drawn(num_sources, 70, 40), drawn(40, seed=1)
    got = gradients(read(attn.attn_res), *inputs)
    assert close(got, gradients(read(attn_reference.attn_res), *inputs))


def test_a_row_of_a_whole_program():
    inputs = drawn(3, 5, 2100), drawn(2100, scale=0.1)
    got = gradients(read(attn.attn_res), *inputs)
    assert close(got, gradients(read(attn_reference.attn_res), *inputs))


def test_a_query_wider_than_the_sources():
    sources, query = drawn(4, 6, 32).bfloat16(), drawn(32)
    got = gradients(read(attn.attn_res), sources, query)
    want = gradients(read(attn_reference.attn_res), sources, query)
    assert [x.dtype for x in got] == [torch.bfloat16, torch.bfloat16, torch.float32]
    assert close(got, want, 1e-2)


def test_the_query_s_gradient_is_the_same_bits_every_time():
    inputs = drawn(3, 600, 64), drawn(64)
    first, second = (gradients(read(attn.attn_res), *inputs) for _ in range(2))
    assert all(map(torch.equal, first, second))


def test_no_token_at_all():
    got = gradients(read(attn.attn_res), drawn(4, 0, 8), drawn(8))
    assert got[0].shape == (0, 8)
    assert torch.equal(got[2], torch.zeros(8))
    got = gradients(lambda x: situ.situ_glu(x, 4.0, 25.0), drawn(0, 8))
    assert got[0].shape == (0, 4)


def test_what_the_reference_serves():
    wide, query = drawn(2, 1, 16385), drawn(16385, scale=0.01)
    more = drawn(2, 3, 4, 8)
    for sources, q in ((drawn(2, 3, 8).double(), drawn(8).double()), (wide, query)):
        got = attn.attn_res(sources, q, 1e-5)
        assert torch.equal(got, attn_reference.attn_res(sources, q, 1e-5))
    got = attn.attn_res(more, drawn(8), 1e-5)
    assert torch.equal(got, attn_reference.attn_res(more, drawn(8), 1e-5))
    x = drawn(3, 8).double()
    assert torch.equal(situ.situ_glu(x, 4.0, 25.0), situ_reference.situ_glu(x, 4.0, 25.0))


def test_few_tokens_load_further_ahead_within_shared_memory():
    k3 = blocks(2048, 7168)
    assert k3 == Blocks(width=8192, height=1, num_warps=8)
    assert stages(8192, k3, 2) == 3
    assert stages(32, k3, 2) == 6
    assert stages(32, blocks(2048, 16384), 4) == 2


@pytest.mark.parametrize(("beta", "linear_beta"), CAPS)
@pytest.mark.parametrize("shape", [(14,), (3, 2200), (2, 3, 2, 6)])
def test_caps_and_shapes(beta, linear_beta, shape):
    inputs = (drawn(*shape, scale=12.0),)
    got = gradients(lambda x: situ.situ_glu(x, beta, linear_beta), *inputs)
    want = gradients(lambda x: situ_reference.situ_glu(x, beta, linear_beta), *inputs)
    assert close(got, want)


def test_small_arguments_keep_their_digits():
    x = drawn(4, 64, scale=1e-4).double()
    want = situ_reference.situ_glu(x, 4.0, 25.0)
    got = situ.situ_glu(x.float(), 4.0, 25.0).double()
    assert ((got - want).abs() <= 1e-6 * want.abs()).all()


def test_a_slice_of_a_wider_projection():
    def sliced(op):
        return lambda fused: op(fused[:, 3:13], 4.0, 25.0)

    fused = drawn(6, 24)
    got = gradients(sliced(situ.situ_glu), fused)
    assert close(got, gradients(sliced(situ_reference.situ_glu), fused))
    assert situ._rows(fused[:, 3:13]).data_ptr() == fused[:, 3:13].data_ptr()


def test_tiles_divide_k3_s_widths():
    assert situ_blocks(2048, 8192, 3072) == (2, 1024, 4096 * 3)
    assert situ_blocks(2048, 8192, 33792) == (2, 1024, 4096 * 33)
    assert not is_rounded(drawn(2).bfloat16())


# The compiler warns of what it meets in any code.
@pytest.mark.filterwarnings("ignore")
def test_a_read_is_one_node_of_a_compiled_graph():
    inputs = drawn(4, 5, 16).mT.contiguous().mT, drawn(16)
    compiled = torch.compile(
        read(attn.attn_res), fullgraph=True, dynamic=False, backend="aot_eager"
    )
    got, want = gradients(compiled, *inputs), gradients(read(attn.attn_res), *inputs)
    torch.compiler.reset()
    assert all(map(torch.equal, got, want))
