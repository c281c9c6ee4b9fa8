"""The file between whoever measures and whoever chooses."""

from __future__ import annotations

import json

import pytest

from perilune.core.errors import ConfigError
from perilune.gateway.profiles import (
    LoadPoint,
    PerformanceProfile,
    Quantiles,
    read_profile,
    write_json,
)

PROFILE = PerformanceProfile(
    model="m",
    endpoint="http://localhost:8000",
    measured_at="2026-11-30T12:00:00+00:00",
    hardware="a machine",
    software={"server": "perilune-0"},
    workload="64 prompt tokens",
    points=(
        LoadPoint(
            load="poisson at 4/s",
            offered_rate=4.0,
            concurrency=2.5,
            min_prompt_tokens=10,
            max_prompt_tokens=20,
            num_requests=100,
            failed=0.25,
            ttft_s=Quantiles(p50=0.1, p90=0.2, p95=0.3, p99=0.4),
            tpot_s=None,
            requests_per_s=3.0,
            prompt_tokens_per_s=45.0,
            output_tokens_per_s=30.0,
            cached=None,
        ),
    ),
)


def test_what_is_written_is_read(tmp_path):
    path = tmp_path / "profile.json"
    write_json(path, PROFILE)
    assert read_profile(path) == PROFILE
    assert [file.name for file in tmp_path.iterdir()] == ["profile.json"]


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"format": "perilune-profile-2"}, "perilune-profile-2"),
        ({"extra": 1}, "extra"),
        ({"points": [{"load": "x"}]}, "missing"),
        ({"model": None}, "model"),
    ],
)
def test_another_format_is_refused(tmp_path, change, says):
    path = tmp_path / "profile.json"
    write_json(path, PROFILE)
    path.write_text(json.dumps(json.loads(path.read_text()) | change))
    with pytest.raises(ConfigError, match=f"{path} is no performance profile: .*{says}"):
        read_profile(path)


@pytest.mark.parametrize(
    ("field", "value"),
    [("failed", 1.5), ("offered_rate", -1.0), ("num_requests", 0.5), ("ttft_s", {"p50": 1.0})],
)
def test_a_point_that_cannot_be_is_refused(tmp_path, field, value):
    path = tmp_path / "profile.json"
    write_json(path, PROFILE)
    raw = json.loads(path.read_text())
    raw["points"][0][field] = value
    path.write_text(json.dumps(raw))
    with pytest.raises(ConfigError):
        read_profile(path)


@pytest.mark.parametrize("data", [b"", b"{", b"\xff", b'{"points": ' + b"[" * 99_999])
def test_no_json(tmp_path, data):
    path = tmp_path / "profile.json"
    path.write_bytes(data)
    with pytest.raises(ConfigError, match="no performance profile"):
        read_profile(path)
