"""Triton's AttnRes read and GLU beyond what the checks draw: layouts, sizes, compiled graphs."""

from __future__ import annotations

import pytest
import torch

from perilune.kernels.attn_res import reference as attn_reference
from perilune.kernels.attn_res import triton as attn
from perilune.kernels.attn_res import triton_backward
from perilune.kernels.attn_res.triton_forward import Plan, plan
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


def same(got, want):
    return all(map(torch.equal, got, want))


def total(out):
    return out.partial_TD.sum()


def read(op):
    """Of a stack of sources, the running sum last."""
    return lambda sources, query: op(sources[-1], sources[:-1], query, 1e-5).h_TD


def step(op):
    """All at once: new sum and normed mixture side by side, the blocks one by one."""

    def run(partial, update, query, weight, *blocks):
        out = op(partial, list(blocks), query, 1e-5, update, weight, 1e-6)
        return torch.cat([out.h_TD, out.partial_TD])

    return run


def step_inputs(num_blocks, tokens=5, width=24):
    rows = [drawn(tokens, width, seed=i) for i in range(num_blocks + 2)]
    return rows[0], rows[1], drawn(width, seed=20), drawn(width, seed=21), *rows[2:]


@pytest.mark.parametrize("num_sources", [1, 2, 9])
def test_any_number_of_sources(num_sources):
    inputs = drawn(num_sources, 9, 40), drawn(40, seed=1)
    got = gradients(read(attn.attn_res), *inputs)
    assert close(got, gradients(read(attn_reference.attn_res), *inputs), 5e-6)


@pytest.mark.parametrize("num_blocks", [1, 4, 8])
def test_blocks_one_by_one_with_update_and_norm(num_blocks):
    inputs = step_inputs(num_blocks)
    got = gradients(step(attn.attn_res), *inputs)
    assert close(got, gradients(step(attn_reference.attn_res), *inputs), 5e-6)


def test_blocks_as_one_tensor_are_the_same_blocks():
    partial, update, query, weight, *blocks = step_inputs(3)

    def stacked(op):
        def run(*x):
            return step(op)(*x[:4], *x[4].unbind())

        def direct(partial, update, query, weight, blocks):
            out = op(partial, blocks, query, 1e-5, update, weight, 1e-6)
            return torch.cat([out.h_TD, out.partial_TD])

        return run, direct

    inputs = partial, update, query, weight, torch.stack(blocks)
    one_by_one, direct = (gradients(run, *inputs) for run in stacked(attn.attn_res))
    assert same(one_by_one, direct)


def test_sources_that_lie_apart_are_read_where_they_are():
    partial, update, query, weight, first, second = step_inputs(2)
    wide = torch.full((5, 60), torch.nan)
    wide[:, 7:31] = first
    turned = second.T.contiguous().T
    apart = partial, update, query, weight, wide[:, 7:31], turned
    want = gradients(step(attn.attn_res), partial, update, query, weight, first, second)
    leaves = [x.detach().requires_grad_() for x in apart]
    y = step(attn.attn_res)(*leaves)
    got = torch.autograd.grad((y * drawn(*y.shape, seed=7)).sum(), leaves)
    assert same([y, *got], want)
    assert attn.row_major(wide[:, 7:31]).data_ptr() == wide[:, 7:31].data_ptr()


def test_only_the_new_sum_is_used():
    partial, update, query, weight, *blocks = step_inputs(2)
    leaves = [x.requires_grad_() for x in (partial, update, query, *blocks)]
    out = attn.attn_res(partial, blocks, query, 1e-5, update, weight, 1e-6)
    got = torch.autograd.grad(total(out), leaves, allow_unused=True)
    assert torch.equal(got[0], torch.ones(5, 24))
    assert torch.equal(got[1], torch.ones(5, 24))
    assert got[2:] == (None, None, None)


def test_statistics_are_kept_for_gradients_only(monkeypatch):
    partial, update, query, weight, *blocks = step_inputs(2)
    kept, run = [], attn.forward

    def recorded(*x, keep):
        kept.append(keep)
        return run(*x, keep=keep)

    monkeypatch.setattr(attn, "forward", recorded)
    with torch.no_grad():
        first = attn.attn_res(partial, blocks, query, 1e-5, update, weight, 1e-6)
    second = attn.attn_res(partial, blocks, query, 1e-5, update, weight, 1e-6)
    assert kept == [False, True]
    assert same(first, second)


@pytest.mark.parametrize("updated", [False, True])
@pytest.mark.parametrize("streams", [False, True])
def test_every_plan_gives_the_same(streams, updated):
    partial, update, query, weight, *blocks = step_inputs(3, tokens=7)
    run = attn.forward
    operands = [*blocks, partial], query, 1e-5, update if updated else None, weight, 1e-6
    want = [x for x in run(*operands, keep=True) if x is not None]
    how = Plan(32, 1, 3, ahead=3) if streams else plan(7, 24, 5, 4)
    got = [x for x in run(*operands, keep=True, how=how) if x is not None]
    assert close(got, want) if streams else same(got, want)


def test_few_tokens_are_held_and_many_pass_as_a_stream():
    assert plan(256, 7168, 10, 2) == Plan(8192, 8, 256)
    assert plan(257, 7168, 10, 2) == Plan(8192, 8, 257, ahead=5)
    assert plan(8192, 7168, 4, 2) == Plan(8192, 8, 264, ahead=5)
    assert plan(8192, 2304, 4, 2).programs == 528
    assert plan(3, 40, 2, 4) == Plan(64, 1, 3)


def test_what_registers_do_not_hold_passes_as_a_stream():
    assert plan(8, 7168, 10, 4) == Plan(8192, 8, 8, ahead=5)
    assert plan(8, 16384, 12, 4) == Plan(16384, 16, 8, ahead=3)
    assert plan(2, 7168, 11, 2).ahead
    inputs = drawn(7, 2, 7000), drawn(7000, scale=0.01)
    assert plan(2, 7000, 7, 4).ahead
    got = gradients(read(attn.attn_res), *inputs)
    assert close(got, gradients(read(attn_reference.attn_res), *inputs), 5e-6)


def test_a_row_of_a_whole_program():
    inputs = drawn(3, 5, 2100), drawn(2100, scale=0.1)
    got = gradients(read(attn.attn_res), *inputs)
    assert close(got, gradients(read(attn_reference.attn_res), *inputs), 5e-6)


def test_a_query_wider_than_the_sources():
    sources, query = drawn(4, 6, 32).bfloat16(), drawn(32)
    got = gradients(read(attn.attn_res), sources, query)
    want = gradients(read(attn_reference.attn_res), sources, query)
    assert [x.dtype for x in got] == [torch.bfloat16, torch.bfloat16, torch.float32]
    assert close(got, want, 1e-2)


def test_gradients_of_what_all_tokens_share_add_up_the_same_way_every_time(monkeypatch):
    monkeypatch.setattr(triton_backward, "at_once", lambda _: 3)
    inputs = step_inputs(3, tokens=9)
    first, second = (gradients(step(attn.attn_res), *inputs) for _ in range(2))
    assert same(first, second)
    assert close(first, gradients(step(attn_reference.attn_res), *inputs), 5e-6)


def test_no_token_at_all():
    got = gradients(read(attn.attn_res), drawn(4, 0, 8), drawn(8))
    assert got[0].shape == (0, 8)
    assert torch.equal(got[2], torch.zeros(8))
    got = gradients(lambda x: situ.situ_glu(x, 4.0, 25.0), drawn(0, 8))
    assert got[0].shape == (0, 4)


def test_what_the_reference_serves():
    wide, query = drawn(2, 1, 16385), drawn(16385, scale=0.01)
    mixed = drawn(3, 8).bfloat16(), drawn(2, 3, 8)
    for sources, q in ((drawn(2, 3, 8).double(), drawn(8).double()), (wide, query)):
        got = read(attn.attn_res)(sources, q)
        assert torch.equal(got, read(attn_reference.attn_res)(sources, q))
    got = attn.attn_res(*mixed, drawn(8), 1e-5).h_TD
    assert torch.equal(got, attn_reference.attn_res(*mixed, drawn(8), 1e-5).h_TD)
    many = drawn(17, 3, 8), drawn(8)
    assert torch.equal(read(attn.attn_res)(*many), read(attn_reference.attn_res)(*many))
    x = drawn(3, 8).double()
    assert torch.equal(situ.situ_glu(x, 4.0, 25.0), situ_reference.situ_glu(x, 4.0, 25.0))


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
@pytest.mark.parametrize("num_blocks", [1, 8])
def test_a_step_is_one_node_of_a_compiled_graph(num_blocks):
    inputs = step_inputs(num_blocks)
    compiled = torch.compile(
        step(attn.attn_res), fullgraph=True, dynamic=False, backend="aot_eager"
    )
    got, want = gradients(compiled, *inputs), gradients(step(attn.attn_res), *inputs)
    torch.compiler.reset()
    assert same(got, want)


@pytest.mark.filterwarnings("ignore")
def test_a_read_is_one_node_of_a_compiled_graph():
    inputs = drawn(4, 5, 16).mT.contiguous().mT, drawn(16)
    compiled = torch.compile(
        read(attn.attn_res), fullgraph=True, dynamic=False, backend="aot_eager"
    )
    got, want = gradients(compiled, *inputs), gradients(read(attn.attn_res), *inputs)
    torch.compiler.reset()
    assert same(got, want)
