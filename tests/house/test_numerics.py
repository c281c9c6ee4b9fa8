"""docs/numerics.md is fresh, and every op has its maths beside it."""

from __future__ import annotations

from pathlib import Path

from cogapp import Cog

from perilune.kernels.registry import OPS

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "numerics.md"


def test_the_table_of_tolerances_is_fresh():
    text = PAGE.read_text(encoding="utf-8")
    assert Cog().process_string(text, str(PAGE)) == text
    assert all(f"| `{name}` |" in text for name in OPS)


def test_every_op_has_its_maths_written_down():
    for path in OPS.values():
        folder = ROOT / "src" / Path(*path.split(":")[0].split("."))
        assert "```" in (folder / "README.md").read_text(encoding="utf-8"), folder
