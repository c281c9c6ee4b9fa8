"""Declared benchmarks: every op has one, its least work is what the formulas say."""

from __future__ import annotations

import inspect

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from perilune.core.errors import UnsupportedError
from perilune.kernels.bench.cases import bench, drawn
from perilune.kernels.bench.inputs import Copies, tensors
from perilune.kernels.kda.bench_cases import prefill_work, sequences
from perilune.kernels.mla.bench_cases import EXCERPT_HEADS, prefill
from perilune.kernels.registry import OPS, load_attr, spec

COPY_RATE = 4269e9
"""Of an H200, read and write."""


def small(op):
    return {name: case for name, case in bench(op).cases.items() if case.device == "cpu"}


@pytest.mark.parametrize("op", OPS)
def test_every_op_has_a_case_for_a_cpu_that_its_reference_accepts(op):
    assert small(op)
    for case in small(op).values():
        inputs = case.inputs(torch.Generator().manual_seed(0))
        inspect.signature(load_attr(spec(op).reference)).bind(**inputs)
        least = bench(op).work(inputs, case.backward)
        assert least.bytes > 0
        assert least.flops > 0


@pytest.mark.parametrize("op", OPS)
def test_big_cases_are_accepted_too(op):
    big = [case for case in bench(op).cases.values() if case.device == "cuda"]
    for case in big:
        with FakeTensorMode():
            inputs = case.inputs(torch.Generator())
            inspect.signature(load_attr(spec(op).reference)).bind(**inputs)
        dtypes = {x.dtype for x in tensors(inputs).values()}
        assert case.dtype in dtypes


def of_kda(op, case):
    declared = bench(op)
    with FakeTensorMode():
        inputs = declared.cases[case].make(torch.Generator(), torch.bfloat16)
        return declared.work(inputs, declared.cases[case].backward), inputs


@pytest.mark.parametrize(
    ("case", "floor_ms", "states"),
    [("T8192_H96", 0.236, 1), ("8x1024_H96", 0.236, 8), ("T65536_H96", 1.889, 1)],
)
def test_prefill_floors_are_those_of_the_table(case, floor_ms, states):
    least, _ = of_kda("kda_chunk", case)
    without_states = least.bytes - 2 * states * 96 * 128 * 128 * 4
    assert 1e3 * without_states / COPY_RATE == pytest.approx(floor_ms, rel=2e-3)


def test_prefill_flops_are_those_of_the_paper():
    least, _ = of_kda("kda_chunk", "T8192_H96")
    assert 1e3 * least.flops / 790e12 == pytest.approx(0.104, rel=5e-3)


@pytest.mark.parametrize(("case", "floor_ms"), [("N256_H96", 0.784), ("N32_H96", 0.098)])
def test_floors_of_a_decoded_step_are_those_of_the_table(case, floor_ms):
    least, inputs = of_kda("kda_step", case)
    # The table holds the windows in bf16; they are fp32 here.
    as_bf16 = least.bytes - inputs["window_SWC"].numel() * 2 * 2
    assert 1e3 * as_bf16 / 4.3e12 == pytest.approx(floor_ms, rel=5e-3)


def test_training_reads_and_writes_more_than_a_forward_pass():
    with FakeTensorMode():
        inputs = sequences((64,), 2)(torch.Generator(), torch.bfloat16)
    forward, both = prefill_work(inputs, False), prefill_work(inputs, True)
    assert both.bytes > 2 * forward.bytes
    assert both.flops == 3 * forward.flops


def test_an_op_without_a_benchmark_is_named():
    with pytest.raises(UnsupportedError, match="unknown op 'kda_chunks'"):
        bench("kda_chunks")


def test_new_values_stand_in_the_same_memory_and_indices_stay_valid():
    case = bench("experts").cases["T4_E16_R2"]
    copies = Copies(case, torch.device("cpu"))
    copies.rotate_beyond(0)
    assert len(copies.copies) == 3
    inputs = copies.copies[0]
    before = {name: (x.data_ptr(), x._version, x.clone()) for name, x in tensors(inputs).items()}
    copies.refresh()
    for name, (pointer, version, old) in before.items():
        x = inputs[name]
        assert (x.data_ptr(), x._version) == (pointer, version)
        assert not torch.equal(x, old)
        assert torch.equal(x.flatten().sort().values, old.flatten().sort().values)
    assert inputs["expert_TR"].max() < 16


def test_copies_differ_and_together_exceed_what_is_asked():
    copies = Copies(bench("situ").cases["T8_I16384"], torch.device("cpu"))
    copies.rotate_beyond(5 << 20)
    first, second = (copies.copies[i]["gate_up_2I"] for i in (0, 1))
    assert not torch.equal(first, second)
    assert copies.bytes_each * len(copies.copies) >= 5 << 20


def test_weights_that_copies_share_are_one_and_change_once_a_round():
    case = bench("experts_mxfp4").cases["T4_E16_R2"]
    copies = Copies(case, torch.device("cpu"))
    copies.rotate_beyond(0)
    first, *others = copies.copies
    before = {name: x.clone() for name, x in tensors(copies.shared).items()}
    assert before.keys() == {"w13_EMKW", "w2_EMKW"}
    for inputs in others:
        assert all(inputs[name] is first[name] for name in before)
        assert not torch.equal(inputs["x_TL"], first["x_TL"])
    copies.refresh()
    for name, old in before.items():
        assert torch.equal(first[name], old.roll(1, 0))
    own = [x for name, x in tensors(first).items() if name not in before]
    assert copies.bytes_each == sum(x.nbytes for x in own)


def test_copies_of_shared_weights_are_as_many_as_what_their_calls_read_asks_for():
    copies = Copies(bench("experts_mxfp4").cases["T4_E16_R2"], torch.device("cpu"))
    copies.rotate_beyond(100, bytes_each=20)
    assert len(copies.copies) == 5


def test_draws_are_scaled():
    x = drawn(torch.Generator().manual_seed(0), torch.float32, 4000, scale=3.0)
    assert float(x.std()) == pytest.approx(3, rel=0.05)


def test_a_few_heads_are_what_the_reference_makes_of_them():
    reference = load_attr(spec("mla_prefill").reference)
    case = bench("mla_prefill").cases["L65536_H96"]
    inputs = prefill((9,), 96, 4, 2, 4)(torch.Generator(), torch.float32)
    whole = case.excerpt.results({"output 0": reference(**inputs)})["output 0"]
    assert whole.shape[1] == len(EXCERPT_HEADS)
    torch.testing.assert_close(reference(**case.excerpt.inputs(inputs)), whole)
    assert all(str(head) in case.excerpt.said for head in EXCERPT_HEADS)
