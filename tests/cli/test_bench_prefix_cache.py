"""`perilune bench prefix-cache`: what it reads and prints."""

from __future__ import annotations

import gzip
import json

import pytest

from perilune.cli.main import main


def line(*blocks: int, length: int, at_ms: int = 0) -> str:
    fields = {"timestamp": at_ms, "input_length": length, "output_length": 1}
    return json.dumps({**fields, "hash_ids": list(blocks)})


@pytest.fixture
def trace(tmp_path):
    """A prompt of three blocks, the same again, and one that shares its first two."""
    path = tmp_path / "trace.jsonl.gz"
    lines = [
        line(7, 8, 9, length=1500),
        line(7, 8, 9, length=1500),
        line(7, 8, 5, 6, length=2000),
    ]
    path.write_bytes(gzip.compress("\n".join(lines).encode()))
    return path


def table(text: str) -> list[list[str]]:
    return [
        [cell.strip() for cell in row.split("|")[1:-1]] for row in text.splitlines() if "|" in row
    ]


def test_hits_beside_the_ideal_ones(trace, capsys):
    assert main(["bench", "prefix-cache", str(trace), "--gb", "0.2,0.3"]) == 0
    out = capsys.readouterr().out
    assert out.startswith("nano: 640 B a token, 526080 B a state; 3 prompts\n")
    header, _, *rows = table(out)
    assert header[:4] == ["GB", "tokens", "states", "hit rate"]
    hits = (1499 + 1024) / 5000
    assert [row[0] for row in rows] == ["0.2", "0.3"]
    assert [row[2] for row in rows] == ["38", "57"]
    assert all(row[3:5] == [f"{hits:.2%}"] * 2 and row[5] == "100.0%" for row in rows)


def test_the_first_requests_alone(trace, capsys):
    assert main(["bench", "prefix-cache", str(trace), "--gb", "0.2", "--requests", "1"]) == 0
    row = table(capsys.readouterr().out)[-1]
    assert row[3:6] == ["0.00%", "0.00%", "-"]


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["--gb", "0.001"], "a prompt needs pages"),
        (["--gb", "0"], "must be positive"),
        (["--model", "none"], "unknown model"),
    ],
)
def test_wrong_usage_is_told(trace, capsys, argv, message):
    try:
        code = main(["bench", "prefix-cache", str(trace), *argv])
    except SystemExit as error:
        code = error.code
    assert code in (1, 2)
    assert message in capsys.readouterr().err


def test_a_trace_without_contents_is_refused(tmp_path, capsys):
    path = tmp_path / "azure.csv"
    path.write_text("TIMESTAMP,ContextTokens,GeneratedTokens\n2023-11-16 18:15:46.68,374,44\n")
    assert main(["bench", "prefix-cache", str(path)]) == 1
    assert "does not tell which prompts share what" in capsys.readouterr().err
