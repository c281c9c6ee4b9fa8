"""Faults of MLA decode in CUDA C++ that change only what programs do with certain inputs.

What they would make of the op's cases is computed here: far out of bound with the fault, and right
without.
"""

from __future__ import annotations

from functools import cache

import decode_faults as faults
import pytest
import torch
from decode_programs import FAR, decoded

from perilune.kernels.common.cases import BF16
from perilune.kernels.mla import cuda_decode
from perilune.kernels.mla.traits import DECODE, LONG_SHARES
from perilune.kernels.registry import load_attr, spec
from perilune.kernels.testing.compare import relative_error

BOUND = BF16[torch.bfloat16].forward
MOST_PROGRAMS = 132
"""At a time, of any Hopper that is sold."""


@cache
def drawn(case: str):
    """The inputs of a case, as conformance draws them, and the truth."""
    declared = spec(faults.OP)
    generator = torch.Generator().manual_seed(list(declared.cases).index(case))
    inputs = declared.cases[case](generator, torch.bfloat16)
    wide = {name: inputs[name].double() for name in ("q_NQHC", "latent_PSC")}
    return inputs, load_attr(declared.reference)(**inputs | wide)


def teams_of(inputs, programs: int = MOST_PROGRAMS) -> int:
    _, queries, heads, _ = inputs["q_NQHC"].shape
    return cuda_decode.plan_of(queries * heads, programs).teams


def onto_the_first_page(inputs):
    return inputs | {"table_NW": inputs["table_NW"].clamp(min=0)}


def without_holes(inputs):
    """Every hole is a page of zeros."""
    pool_PSC, table_NW = inputs["latent_PSC"], inputs["table_NW"]
    pool_PSC = torch.cat([pool_PSC, torch.zeros_like(pool_PSC[:1])])
    table_NW = table_NW.masked_fill(table_NW < 0, len(pool_PSC) - 1)
    return inputs | {"latent_PSC": pool_PSC, "table_NW": table_NW}


@pytest.mark.parametrize("case", ["k3_holes", "k3_rises", "k3_far_apart"])
def test_programs_without_a_fault_are_right(case):
    inputs, truth = drawn(case)
    assert relative_error(decoded(inputs, teams_of(inputs)), truth) < BOUND


@pytest.mark.parametrize(
    ("name", "case", "change", "how"),
    [
        ("a hole is the first page", "k3_holes", onto_the_first_page, {}),
        ("a hole is seen", "k3_holes", without_holes, {}),
        ("shares without a limit", "k3_rises", dict, {"far": 1e30}),
        ("parts faded by the other's share", "k3_rises", dict, {"others_share": True}),
    ],
)
def test_a_case_tells_a_fault(name, case, change, how):
    assert name in faults.FAULTS
    assert case in faults.CASES
    inputs, truth = drawn(case)
    wrong = decoded(change(inputs), teams_of(inputs), **how)
    assert relative_error(wrong, truth) > 5 * BOUND


def test_far_apart_tiles_meet_in_one_program():
    """As the source has it, and in the cases that are for it."""
    assert f"FAR = {FAR:.0f}.f" in cuda_decode.SOURCE.read_text()
    for case in ("k3_holes", "k3_rises"):
        inputs = spec(faults.OP).cases[case](torch.Generator(), torch.bfloat16)
        assert teams_of(inputs) == 1


def test_a_share_is_longer_than_what_is_looked_up_at_first():
    assert "AHEAD = 64;" in cuda_decode.SOURCE.read_text()
    assert LONG_SHARES in faults.ROWS
    inputs = DECODE.make(torch.Generator(), torch.bfloat16, (LONG_SHARES,), 576)
    tiles = -(-inputs["length_N"] // cuda_decode.TOKENS)
    assert int(tiles.sum()) / teams_of(inputs) > 64
