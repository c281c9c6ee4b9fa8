"""Faults of MLA decode in CUDA C++ that a GPU has to find: each still stands in the source once."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path

import pytest

from perilune.kernels.mla import cuda_decode
from perilune.kernels.registry import spec
from perilune.kernels.testing.properties import FAMILIES

PATH = Path(__file__).parents[1] / "gpu" / "decode_faults.py"
where = importlib.util.spec_from_file_location("decode_faults", PATH)
faults = importlib.util.module_from_spec(where)
sys.modules["decode_faults"] = faults
where.loader.exec_module(faults)


@pytest.mark.parametrize("name", faults.FAULTS)
def test_a_fault_changes_one_place(name, tmp_path):
    fault, (header,) = faults.FAULTS[name], cuda_decode.HEADERS
    copies = faults.planted(fault, cuda_decode.SOURCE, header, tmp_path)
    changed = [
        copy.read_text() != path.read_text()
        for copy, path in zip(copies, (cuda_decode.SOURCE, header), strict=True)
    ]
    assert sorted(changed) == [False, True]
    assert [copy.name for copy in copies] == [cuda_decode.SOURCE.name, header.name]


def test_a_fault_that_stands_nowhere_is_told(tmp_path):
    with pytest.raises(ValueError, match="does not stand once"):
        faults.planted(
            faults.Fault("no such line", ""),
            cuda_decode.SOURCE,
            *cuda_decode.HEADERS,
            tmp_path,
        )


def test_the_checks_that_find_them_are_there():
    assert {fault.found_by for fault in faults.FAULTS.values()} <= {"conformance", *FAMILIES}
    assert set(faults.CASES) <= spec(faults.OP).cases.keys()


def test_what_a_process_says_is_its_verdict(monkeypatch, tmp_path):
    script = tmp_path / "script.py"
    monkeypatch.setattr(faults, "__file__", str(script))

    def of(body: str) -> str:
        script.write_text(body)
        return faults.verdict("any")

    assert of("print()") == ""
    assert of("print('k3_rows: output 0 1.0e+00')") == "k3_rows: output 0 1.0e+00"
    assert of("raise SystemExit(3)").startswith("exit status 3")
    monkeypatch.setattr(faults, "SECONDS", 0.5)
    assert of("while True: pass") == "nothing in 0.5 s"
