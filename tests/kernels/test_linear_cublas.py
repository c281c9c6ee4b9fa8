"""The product that cuBLAS serves: the reference's result and gradients, and no TF32."""

from __future__ import annotations

import pytest
import torch

from perilune.core.errors import UnsupportedError
from perilune.kernels.linear import cublas, reference


def drawn(token_dtype, weight_dtype):
    generator = torch.Generator().manual_seed(1)
    x_TI = torch.randn(5, 8, generator=generator).to(token_dtype).requires_grad_()
    return x_TI, torch.randn(3, 8, generator=generator).to(weight_dtype).requires_grad_()


@pytest.mark.parametrize("weight_dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("token_dtype", [torch.float32, torch.bfloat16])
def test_tokens_and_weight_may_differ_in_dtype(token_dtype, weight_dtype):
    leaves = drawn(token_dtype, weight_dtype)
    got, want = (op(*leaves) for op in (cublas.linear, reference.linear))
    assert got.dtype == token_dtype
    assert torch.equal(got, want)
    grads = [torch.autograd.grad(y.float().square().sum(), leaves) for y in (got, want)]
    assert all(map(torch.equal, *grads))


@pytest.fixture
def tf32():
    before = torch.backends.cuda.matmul.allow_tf32
    torch.backends.cuda.matmul.allow_tf32 = True
    yield
    torch.backends.cuda.matmul.allow_tf32 = before


@pytest.mark.usefixtures("tf32")
def test_fp32_is_never_tf32():
    with pytest.raises(UnsupportedError, match="allow_tf32 has to stay False"):
        cublas.linear(*drawn(torch.float32, torch.bfloat16))
    assert cublas.linear(*drawn(torch.bfloat16, torch.float32)).dtype == torch.bfloat16


# The compiler warns of what it meets in any code.
@pytest.mark.filterwarnings("ignore")
def test_it_is_part_of_a_compiled_graph():
    leaves = drawn(torch.float32, torch.float32)
    compiled = torch.compile(cublas.linear, fullgraph=True, backend="aot_eager")
    assert torch.equal(compiled(*leaves), cublas.linear(*leaves))
    torch.compiler.reset()
