"""The router's product in Triton: fp32's precision from parts in bf16, and planted faults."""

from __future__ import annotations

import pytest
import torch
import triton
import triton.language as tl
from triton_faults import plant_in_source

from perilune.core.errors import UnsupportedError
from perilune.kernels.linear import cublas, reference, triton_scores, triton_scores_many
from perilune.kernels.linear import triton as linear
from perilune.kernels.linear.triton_scores_many import Tile, tile_of
from perilune.kernels.testing import relative_error
from perilune.kernels.testing.memory import NewMemory, banded

FP32, BF16 = torch.float32, torch.bfloat16
LIMIT = 5e-7
"""A third part left out is 1e-6 to 3e-6 of the whole."""


def drawn(tokens, width, outputs, token_dtype=BF16, weight_dtype=FP32):
    generator = torch.Generator().manual_seed(width)
    x_TI = torch.randn(tokens, width, generator=generator).to(token_dtype)
    return x_TI, torch.randn(outputs, width, generator=generator).to(weight_dtype)


def error(x_TI, weight_OI, run=linear.scores):
    """Sevens lie around the operands, and NaN in new memory."""
    operands = [banded(x, 7.0)[1].copy_(x) for x in (x_TI, weight_OI)]
    with NewMemory(poisoned=True):
        y_TO = run(*operands)
    assert y_TO.dtype == FP32
    return relative_error(y_TO, x_TI.double() @ weight_OI.double().t())


@pytest.mark.parametrize("weight_dtype", [FP32, BF16])
@pytest.mark.parametrize("token_dtype", [FP32, BF16])
@pytest.mark.parametrize("sizes", [(3, 640, 70), (70, 130, 65), (1, 37, 1), (20, 64, 896)])
def test_fp32_s_precision(sizes, token_dtype, weight_dtype):
    assert error(*drawn(*sizes, token_dtype, weight_dtype)) < LIMIT


@pytest.mark.parametrize("weight_dtype", [FP32, BF16])
@pytest.mark.parametrize("token_dtype", [FP32, BF16])
@pytest.mark.parametrize("tile", [None, Tile(128, 64, 8, 1 << 16), Tile(128, 128, 8, 1 << 16)])
@pytest.mark.parametrize("sizes", [(3, 640, 70), (150, 130, 20)])
def test_fp32_s_precision_of_many(sizes, tile, token_dtype, weight_dtype):
    def run(*operands):
        return triton_scores_many.scores(*operands, tile)

    assert error(*drawn(*sizes, token_dtype, weight_dtype), run) < LIMIT


@pytest.mark.parametrize("dtypes", [(BF16, BF16), (BF16, FP32), (FP32, FP32)])
def test_many_have_the_bits_of_few(dtypes):
    """In the interpreter, in tiles of the same size: several splits, the last one shorter."""
    x_TI, weight_OI = drawn(150, 64 * 12 - 5, 66, *dtypes)
    assert triton_scores.splits_of(x_TI.shape[1], 2) == (1, 12)
    few = triton_scores.scores(x_TI, weight_OI)
    assert torch.equal(triton_scores_many.scores(x_TI, weight_OI, Tile(64, 64, 4, 1 << 16)), few)


def test_large_tiles_wait_for_tokens_enough():
    assert tile_of(2048, 1).rows == tile_of(2048, 3).tokens == 64
    assert (tile_of(2049, 1).rows, tile_of(2049, 1).tokens) == (128, 128)
    assert tile_of(2049, 3).tokens == tile_of(600, 9).tokens == 64


def test_k3_s_width():
    assert error(*drawn(2, 7168, 66)) < LIMIT
    steps, count = triton_scores.splits_of(7168, 896 // triton_scores.ROWS)
    assert (steps, count) == (13, 9)
    assert 14 * count <= triton_scores.PROGRAMS


@pytest.mark.parametrize("width", [1, 64, 65, 2304, 7168, 10**5])
@pytest.mark.parametrize("row_tiles", [1, 4, 14, 500])
def test_splits_hold_every_column_once(width, row_tiles):
    steps, count = triton_scores.splits_of(width, row_tiles)
    columns = steps * triton_scores.COLUMNS
    assert (count - 1) * columns < width <= count * columns


def test_a_token_s_bits_are_its_own():
    """Whatever is beside it. In the interpreter, in one place of one size of tiles."""
    x_TI, weight_OI = drawn(150, 130, 20)
    for many, few in ((16, 1), (16, 3), (150, 40)):
        together, alone = (linear.scores(x_TI[:tokens], weight_OI) for tokens in (many, few))
        assert torch.equal(together[:few], alone)
    broken = x_TI.clone()
    broken[1:] = torch.nan
    assert torch.equal(linear.scores(broken, weight_OI)[0], linear.scores(x_TI, weight_OI)[0])


@triton.jit
def _keep_parts(x_p, part_p, N: tl.constexpr):
    n_ = tl.arange(0, N)
    high, middle, low = triton_scores._parts(tl.load(x_p + n_), 3, tl.float32)
    tl.store(part_p + n_, high)
    tl.store(part_p + N + n_, middle)
    tl.store(part_p + 2 * N + n_, low)


def test_parts_are_numbers_of_bf16_and_add_up_exactly():
    """In the interpreter a product would take what bf16 does not hold."""
    bits = torch.randint(2**31, (4096,), generator=torch.Generator().manual_seed(1))
    signs = torch.arange(4096) % 2 * -(2**31)
    exponents = 27 + bits % 227  # from 2^-100 to the largest finite one but one
    x = ((bits & 0x7FFFFF) | exponents << 23 | signs).to(torch.int32).view(FP32)
    part = torch.full((3, 4096), torch.nan)
    _keep_parts[(1,)](x, part, N=4096)
    assert torch.equal(part.bfloat16().float(), part)
    assert torch.equal(part.double().sum(0), x.double())
    assert (part[1].abs() <= x.abs() / 256).all()
    assert (part[2].abs() <= x.abs() / 2**16).all()


@pytest.mark.parametrize("dtypes", [(FP32, FP32), (BF16, FP32), (BF16, BF16), (FP32, BF16)])
def test_gradients(dtypes):
    leaves = [x.requires_grad_() for x in drawn(6, 80, 9, *dtypes)]
    dy_TO = torch.randn(6, 9, generator=torch.Generator().manual_seed(2))
    got, want = (
        torch.autograd.grad(op(*leaves), leaves, dy_TO) for op in (linear.scores, reference.scores)
    )
    assert [g.dtype for g in got] == list(dtypes)
    assert all(
        relative_error(a, b) < (1e-6 if a.dtype == FP32 else 5e-3)
        for a, b in zip(got, want, strict=True)
    )


def test_who_serves(monkeypatch):
    """fp64 and compiled graphs are cuBLAS's."""
    ran = []

    def watched(module):
        run = module.scores

        def own(*args):
            ran.append((module is triton_scores_many, len(args[0])))
            return run(*args)

        monkeypatch.setattr(module, "scores", own)

    for module in (triton_scores, triton_scores_many):
        watched(module)
    for tokens, dtype in (
        (512, BF16),
        (513, BF16),
        (2, torch.float64),
        (2, torch.float16),
        (0, BF16),
    ):
        x_TI, weight_OI = drawn(tokens, 16, 3, dtype)
        got, want = (op(x_TI, weight_OI) for op in (linear.scores, reference.scores))
        assert got.dtype == want.dtype
        torch.testing.assert_close(got, want)
    assert ran == [(False, 512), (True, 513), (False, 2), (False, 0)]


# The compiler warns of what it meets in any code.
@pytest.mark.filterwarnings("ignore")
def test_it_is_part_of_a_compiled_graph():
    leaves = drawn(5, 8, 3)
    compiled = torch.compile(linear.scores, fullgraph=True, backend="aot_eager")
    assert torch.equal(compiled(*leaves), cublas.linear(leaves[0].float(), leaves[1]))
    torch.compiler.reset()


@pytest.fixture
def settings():
    before = torch.backends.cuda.matmul.allow_tf32
    yield torch.backends.cuda.matmul
    torch.backends.cuda.matmul.allow_tf32 = before


def test_gradients_are_never_tf32(settings):
    x_TI, weight_OI = drawn(5, 8, 3)
    y_TO = linear.scores(x_TI, weight_OI.requires_grad_())
    settings.allow_tf32 = True
    with pytest.raises(UnsupportedError, match="TF32"):
        y_TO.sum().backward()


FAULTS = {
    "the third part is lost": ("(rest - middle).to(DTYPE)", "(0 * rest).to(DTYPE)"),
    "parts are cut out of place": ("+ 0x8000", "+ 0x80000"),
    "two levels of three": ("tl.static_range(3)", "tl.static_range(2)"),
    "levels in the wrong place": ("if i + j == 2 - level", "if i + j == 1 - level"),
    "a split too few": ("tl.static_range(SPLITS)", "tl.static_range(SPLITS - 1)"),
    "splits overlap": ("first = split * STEPS * BK", "first = split * STEPS * BK // 2"),
    "columns beyond the last": ("here_1K = (k_ < WIDTH - k)", "here_1K = (k_ < WIDTH)"),
    "a part of another split": ("* num_tokens + t_)", "+ t_)"),
    "rows of another tile": ("o_ = tl.program_id(0) * BO", "o_ = tl.program_id(0) // 2 * BO"),
    "tokens of another tile": ("t_ = tl.program_id(2) * BT", "t_ = tl.program_id(2) // 2 * BT"),
}  # fmt: skip


@pytest.mark.parametrize("name", FAULTS)
def test_a_planted_fault_is_seen(name, tmp_path, monkeypatch):
    right, wrong = FAULTS[name]
    users = (triton_scores,)
    plant_in_source(triton_scores, right, wrong, users, tmp_path, monkeypatch)
    assert not error(*drawn(70, 200, 70, FP32, FP32)) < LIMIT


AMONG_MANY = {
    "a split too few": ("in range(SPLITS)", "in range(SPLITS - 1)"),
    "the last split alone": ("y_OT += of_split(", "y_OT = of_split("),
    "rows of another tile": ("o_ = tl.program_id(0) * BO", "o_ = tl.program_id(0) // 2 * BO"),
    "tokens of another tile": ("tl.program_id(1).to(tl.int64)", "(tl.program_id(1) // 2)"),
}  # fmt: skip


SHARED = ("splits overlap", "columns beyond the last")


@pytest.mark.parametrize("name", [*AMONG_MANY, *SHARED])
def test_a_fault_planted_among_many_is_seen(name, tmp_path, monkeypatch):
    module = triton_scores if name in SHARED else triton_scores_many
    right, wrong = (FAULTS if name in SHARED else AMONG_MANY)[name]
    users = (triton_scores_many,)
    plant_in_source(module, right, wrong, users, tmp_path, monkeypatch)
    run = triton_scores_many.scores
    assert not error(*drawn(70, 200, 70, BF16, BF16), run) < LIMIT
