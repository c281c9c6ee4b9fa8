"""docs/balancing.md says what the benchmark measured."""

import json
from pathlib import Path

from cogapp import Cog

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "balancing.md"
RESULT = ROOT / "benchmarks" / "results" / "balance_epyc2_202612.json"


def test_the_table_is_fresh_and_shows_the_claim(monkeypatch):
    monkeypatch.chdir(ROOT)
    text = PAGE.read_text(encoding="utf-8")
    assert Cog().process_string(text, str(PAGE)) == text
    runs = json.loads(RESULT.read_text(encoding="utf-8"))["runs"]
    for name in ("quantile", "quantile, 262,144 fresh tokens a step"):
        assert runs[name]["max_violation"][0] > 30
        assert runs[name]["even_from_step"] <= 10
    assert min(runs["sign rule, step 0.001"]["max_violation"][:200]) > 1
