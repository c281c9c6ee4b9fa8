"""Faults that a GPU has to find in sources in CUDA C++: each still stands in its source once, and
there are inputs that reach it."""

from __future__ import annotations

import cuda_faults
import decode_faults
import products_faults
import pytest
import torch
from planting import Fault, planted

from perilune.kernels.experts import cuda_products, shared_out
from perilune.kernels.experts.mxfp4_traits import SPEC as TRAITS
from perilune.kernels.experts.tiles import COLUMNS
from perilune.kernels.registry import spec
from perilune.kernels.testing.properties import FAMILIES

EVERY = [(op, name) for op, faults in cuda_faults.OPS.items() for name in faults.named]


@pytest.mark.parametrize(("op", "name"), EVERY)
def test_a_fault_changes_one_place(op, name, tmp_path):
    programs, fault = cuda_faults.OPS[op].programs, cuda_faults.OPS[op].named[name]
    (header,) = programs.HEADERS
    copies = planted(fault, programs.SOURCE, header, tmp_path)
    changed = [
        copy.read_text() != path.read_text()
        for copy, path in zip(copies, (programs.SOURCE, header), strict=True)
    ]
    assert sorted(changed) == [False, True]
    assert [copy.name for copy in copies] == [programs.SOURCE.name, header.name]


def test_a_fault_that_stands_nowhere_is_told(tmp_path):
    with pytest.raises(ValueError, match="does not stand once"):
        planted(
            Fault("no such line", "", "few"),
            cuda_products.SOURCE,
            *cuda_products.HEADERS,
            tmp_path,
        )


@pytest.mark.parametrize("op", cuda_faults.OPS)
def test_every_check_is_needed(op):
    faults = cuda_faults.OPS[op]
    assert {fault.found_by for fault in faults.named.values()} == faults.checks.keys()


def test_the_checks_that_find_them_are_there():
    assert {decode_faults.LENGTHS, products_faults.POISON} <= FAMILIES.keys()
    assert set(decode_faults.CASES) <= spec(decode_faults.OP).cases.keys()
    named = products_faults.FEW_CASES + products_faults.MANY_CASES
    assert set(named) <= spec(products_faults.OP).cases.keys()


def test_slow_ones_come_first():
    everything = cuda_faults.asked(["mla_decode", "experts_mxfp4"])
    assert len(everything) == 2 + len(EVERY)
    assert [one.fault for one in everything[:2]] == ["", ""]
    slow = {decode_faults.LENGTHS, products_faults.MANY}
    found_by = [cuda_faults.OPS[op].named[name].found_by for op, name in everything[2:]]
    first = sum(name in slow for name in found_by)
    assert all(name in slow for name in found_by[:first])


def test_what_a_process_says_is_its_verdict(monkeypatch, tmp_path):
    script = tmp_path / "script.py"
    monkeypatch.setattr(cuda_faults, "__file__", str(script))

    def of(body: str) -> str:
        script.write_text(f"import sys\nassert sys.argv[1:] == ['op', '--fault', 'any']\n{body}")
        return cuda_faults.verdict(cuda_faults.Asked("op", "any"))

    assert of("print()") == ""
    assert of("print('k3_rows: output 0 1.0e+00')") == "k3_rows: output 0 1.0e+00"
    assert of("raise SystemExit(3)").startswith("exit status 3")
    monkeypatch.setattr(cuda_faults, "SECONDS", 0.5)
    assert of("while True: pass") == "nothing in 0.5 s"


def drawn(case):
    return spec(products_faults.OP).cases[case](torch.Generator(), torch.bfloat16)


def tile_of(inputs):
    pairs, num_experts = inputs["expert_TR"].numel(), len(inputs["w13_EMKW"])
    return cuda_products.tile_for(pairs, num_experts, torch.bfloat16)


def widths_of(inputs):
    """Columns of the products of every expert's tiles."""
    tile, expert_TR = tile_of(inputs), inputs["expert_TR"]
    counts = expert_TR[expert_TR >= 0].bincount().tolist()
    parts = [min(tile.tokens, n - first) for n in counts for first in range(0, n, tile.tokens)]
    return {max(tile.least, -(-part // 8) * 8) for part in parts}


@pytest.mark.parametrize(
    ("cases", "counts", "tile"),
    [
        (products_faults.FEW_CASES, products_faults.FEW_COUNTS, cuda_products.FEW),
        (products_faults.MANY_CASES, products_faults.MANY_COUNTS, cuda_products.MANY),
    ],
    ids=["few", "many"],
)
def test_every_width_is_reached_by_inputs_that_are_served(cases, counts, tile):
    widths = shared_out(torch.Generator(), torch.bfloat16, counts)
    inputs = [widths, *map(drawn, cases)]
    for each in inputs:
        assert tile_of(each) == tile
        assert not each["wide"]
        assert each["x_TL"].shape[1] * 2 % cuda_products.ALIGNMENT == 0
    assert widths_of(widths) == set(range(tile.least, tile.tokens + 1, 8))
    # Full ones, and ones with one token more than the width before.
    assert {n % 8 for n in counts} == {0, 1}


def test_conformance_reaches_every_width_of_few_and_the_ends_of_many():
    few, many = cuda_products.FEW, cuda_products.MANY
    assert widths_of(drawn("up_to_32_each")) == set(range(few.least, few.tokens + 1, 8))
    assert {many.least, many.tokens} < widths_of(drawn("crowded"))


@pytest.mark.parametrize("case", ["long_rows", "long_rows_crowded"])
def test_columns_go_round_the_ring(case):
    inputs = drawn(case)
    column_tiles, row_tiles = inputs["w13_EMKW"].shape[2], inputs["w2_EMKW"].shape[1]
    assert column_tiles > tile_of(inputs).stages
    assert column_tiles % 2 == 1
    assert 0 < inputs["x_TL"].shape[1] % COLUMNS < 32
    assert row_tiles % 4 == 2


def test_somebody_s_pairs_are_nobody_s():
    for case in ("up_to_32_each", "crowded"):
        expert_TR = drawn(case)["expert_TR"]
        assert (expert_TR < 0).any()
        assert len(expert_TR.unique()) > 2


def test_a_row_s_tail_is_the_next_row():
    """What `poison` draws: between the products, rows end within a column tile."""
    inputs = TRAITS.make(torch.Generator(), torch.bfloat16, (products_faults.TOKENS,), 256)
    assert tile_of(inputs) == cuda_products.FEW
    hidden = inputs["w13_EMKW"].shape[1] * 32
    assert hidden % COLUMNS > 0
    assert inputs["w2_EMKW"].shape[2] * COLUMNS > hidden
