"""Triton's convolution and KDA inside of a compiled graph: the results of their eager forms."""

from __future__ import annotations

import pytest
import torch

from perilune.kernels import registry
from perilune.kernels.causal_conv import triton as conv
from perilune.kernels.common.packing import Packing
from perilune.kernels.kda import triton as kda
from perilune.model.init import random_weights
from perilune.model.model import Transformer
from perilune.model.parse_config import parse_config
from perilune.model.presets import tiny_k3
from perilune.train.step import DeviceBatch, batch_loss

SEGMENTS = torch.tensor([[3, 3, 5, 5, 5, 5, 9], [1, 2, 2, 2, 2, 2, 2]]).repeat_interleave(6, 1)


def convolution(packing, x, w, window):
    return conv.causal_conv(x, w, packing, window)


def chunked(packing, q, k, v, z, b, A_log, dt_bias, state):
    return kda.kda_chunk(q, k, v, z, b, A_log, dt_bias, packing, -5.0, state)


def shapes(op, tokens, sequences):
    if op is convolution:
        return [(tokens, 6), (6, 4), (sequences, 3, 6)]
    h, d = 2, 16
    return [*[(tokens, h, d)] * 4, (tokens, h), (h,), (h, d), (sequences, h, d, d)]


def run(op, packing, leaves):
    """Every output, and the gradients of a projection of them, as a caller of the op sees them."""
    outputs = [x for x in op(packing, *leaves) if x is not None]
    weights = [torch.linspace(-1, 1, x.numel()).view(x.shape) for x in outputs]
    loss = sum((x.float() * w).sum() for x, w in zip(outputs, weights, strict=True))
    wanted = [x for x in leaves if x is not None]
    return [*outputs, *torch.autograd.grad(loss, wanted)]


# The compiler warns of what it meets in any code.
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("op", [convolution, chunked])
@pytest.mark.parametrize(
    ("packing", "has_state"),
    [(Packing.of((33, 0, 7)), True), (Packing.rows(SEGMENTS), False)],
    ids=["states", "documents"],
)
def test_one_graph_gives_what_the_eager_op_gives(op, packing, has_state):
    generator = torch.Generator().manual_seed(3)
    tokens, sequences = sum(packing.lengths), packing.num_sequences
    leaves = [torch.randn(s, generator=generator) for s in shapes(op, tokens, sequences)]
    # The interpreter multiplies no bf16 matrices; the convolution has none.
    leaves[0] = leaves[0].bfloat16() if op is convolution else leaves[0]
    leaves = [x.requires_grad_() for x in leaves]
    if not has_state:
        leaves[-1] = None
    compiled = torch.compile(op, fullgraph=True, dynamic=False, backend="aot_eager")
    got, want = run(compiled, packing, leaves), run(op, packing, leaves)
    torch.compiler.reset()
    assert [x.dtype for x in got] == [x.dtype for x in want]
    assert all(map(torch.equal, got, want))


@pytest.mark.filterwarnings("ignore")
def test_a_strided_slice_of_a_projection():
    fused = torch.randn(20, 24, generator=torch.Generator().manual_seed(1)).requires_grad_()
    weight = torch.ones(6, 4)

    def sliced(fused):
        return (conv.causal_conv(fused[:, 8:14], weight, Packing.of((20,))).y_TC.sin(),)

    compiled = torch.compile(sliced, fullgraph=True, backend="aot_eager")
    want = torch.autograd.grad(sliced(fused)[0].sum(), fused)
    assert torch.equal(torch.autograd.grad(compiled(fused)[0].sum(), fused)[0], want[0])
    torch.compiler.reset()


@pytest.mark.filterwarnings("ignore")
def test_a_whole_loss_is_one_graph(monkeypatch):
    # Dense: routed experts in fp32 ask the host for their sizes.
    heads = {"num_heads": 1, "head_dim": 16}
    raw = tiny_k3(num_hidden_layers=2, first_k_dense_replace=2, linear_attn=heads)
    model = random_weights(Transformer(parse_config(raw)), torch.Generator().manual_seed(5))
    batch = DeviceBatch(*[SEGMENTS[:, :20]] * 3)
    want = batch_loss(model, batch)
    for op in list(registry._ops):
        if op.name in ("attn_res", "causal_conv", "kda_chunk", "linear", "mla_prefill"):
            run = registry.load_attr(registry.spec(op.name).backends["cuda"])
            monkeypatch.setitem(op._chosen, "cpu", run)
    compiled = torch.compile(batch_loss, fullgraph=True, dynamic=False, backend="eager")
    loss = compiled(model, batch)
    torch.testing.assert_close(loss, want)
    leaves = list(model.parameters())
    got, plain = (torch.autograd.grad(x, leaves, allow_unused=True) for x in (loss, want))
    torch.testing.assert_close(got, plain, rtol=1e-4, atol=1e-6)
    torch.compiler.reset()
