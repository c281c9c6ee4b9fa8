"""`perilune bench serve`: options, exit codes, what it prints and writes."""

from __future__ import annotations

import argparse
import asyncio
import json
import subprocess
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import Future

import pytest
import uvloop

from perilune.cli import bench
from perilune.cli.bench_options import load_test
from perilune.cli.main import main
from perilune.core.errors import ConfigError
from perilune.core.fakes import FakeEngine
from perilune.gateway.app import Gateway
from perilune.gateway.backends.local import LocalModel
from perilune.gateway.load.plan import LoadTest
from perilune.gateway.load.workload import Load
from perilune.gateway.profiles import read_profile
from perilune.gateway.router import Route, Router
from perilune.gateway.server import free_address, listening
from perilune.telemetry.metrics import ServerMetrics
from perilune.text.tiktoken_ranks import byte_level
from perilune.text.xtml_format import XtmlFormat


def parsed(*argv: str) -> LoadTest:
    parser = argparse.ArgumentParser()
    bench.add_arguments(parser)
    return load_test(parser.parse_args(["serve", *argv]))


def poisson(rate: float) -> Load:
    return Load(arrivals="poisson", rate=rate)


@pytest.mark.parametrize(
    ("argv", "loads"),
    [
        ([], [poisson(1.0)]),
        (["--rate", "0.5,2,8"], [poisson(0.5), poisson(2.0), poisson(8.0)]),
        (["--arrivals", "constant", "--rate", "3"], [Load(arrivals="constant", rate=3.0)]),
        (["t.csv"], [Load(arrivals="trace")]),
        (["t.csv", "--speed", "2,4"], [Load(arrivals="trace", speed=s) for s in (2.0, 4.0)]),
        (["t.csv", "--rate", "2"], [Load(arrivals="trace", rate=2.0)]),
        (["t.csv", "--arrivals", "poisson", "--rate", "2"], [poisson(2.0)]),
        (["--concurrency", "1,8"], [Load(arrivals="closed", concurrency=n) for n in (1, 8)]),
    ],
)
def test_loads(argv, loads):
    assert list(parsed(*argv).loads) == loads


def test_a_run_has_an_end():
    assert parsed().bounds.seconds == 60.0
    assert parsed("--requests", "5").bounds.seconds is None
    assert parsed("--requests", "5", "--seconds", "2").bounds.seconds == 2.0


def test_milliseconds_become_seconds():
    limits = parsed("--slo-ttft-ms", "500", "--slo-tpot-ms", "20", "--max-lag-ms", "5").limits
    assert (limits.slo_ttft_s, limits.slo_tpot_s, limits.max_lag_s) == (0.5, 0.02, 0.005)


def test_a_chat_gets_text():
    assert parsed("--endpoint", "chat").prompt_form == "text"
    assert parsed().prompt_form == "ids"


@pytest.mark.parametrize(
    ("argv", "says"),
    [
        (["--endpoint", "chat", "--prompt", "ids"], "takes no token ids"),
        (["--arrivals", "trace"], "needs a TRACE"),
        (["--speed", "2"], "--speed is of a trace"),
        (["t.csv", "--arrivals", "poisson", "--speed", "2"], "--speed is of a trace"),
        (["--concurrency", "2", "--arrivals", "poisson"], "closed loop"),
        (["--out", "/no/such/dir/x.json"], "/no/such/dir is not a directory"),
    ],
)
def test_options_that_exclude_each_other(argv, says):
    with pytest.raises(ConfigError, match=says):
        parsed(*argv)


@pytest.mark.parametrize(
    "argv",
    [
        ["--rate", "0"],
        ["--rate", "nan"],
        ["--rate", "1,,2"],
        ["--rate", "1", "--concurrency", "1"],
        ["--seconds", "-1"],
        ["--seconds", "inf"],
        ["--scale-tokens", "0"],
        ["--requests", "0"],
        ["--temperature", "3"],
        ["--token-ids", "5"],
        ["--token-ids", "-1:5"],
        ["--skip", "-1"],
    ],
)
def test_wrong_values_are_one_line(capsys, argv):
    with pytest.raises(SystemExit) as exit_info:
        main(["bench", "serve", *argv])
    assert exit_info.value.code == 2
    assert capsys.readouterr().err.count("\n") == 1


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    """The front with the fake engine behind it, in a thread."""
    started: Future[str] = Future()
    stop = asyncio.Event()

    async def serve() -> asyncio.AbstractEventLoop:
        engine = FakeEngine()
        metrics = ServerMetrics()
        metrics.watch_engine("fake", engine.stats)
        model = LocalModel(engine, XtmlFormat(byte_level()))
        address = free_address("127.0.0.1", 0)
        async with listening(Gateway(Router([Route(model=model)]), metrics), address):
            loops.append(asyncio.get_running_loop())
            started.set_result(address.url)
            await stop.wait()

    loops: list[asyncio.AbstractEventLoop] = []
    thread = threading.Thread(target=lambda: uvloop.run(serve()))
    thread.start()
    yield started.result(timeout=30)
    loops[0].call_soon_threadsafe(stop.set)
    thread.join(timeout=30)


SMALL = ["--token-ids", "97:123", "--prompt-tokens", "20", "--output-tokens", "4"]


def test_a_run_prints_a_summary_and_writes_both_files(url, tmp_path, capsys, monkeypatch):
    monkeypatch.setenv("PERILUNE_API_KEY", "top secret")
    trace = tmp_path / "azure.csv"
    rows = [f"2023-11-16 18:17:0{k}.5,{100 + k},50" for k in range(8)]
    trace.write_text("\n".join(["TIMESTAMP,ContextTokens,GeneratedTokens", *rows]))
    out, profile = tmp_path / "out.json", tmp_path / "profile.json"
    argv = ["bench", "serve", str(trace), "--url", url, "--rate", "50", "--scale-tokens", "0.1"]
    files = ["--out", str(out), "--profile", str(profile), "--max-lag-ms", "60000"]
    assert main([*argv, *SMALL, *files]) == 0
    told = capsys.readouterr()
    assert told.out.startswith("# fake at http://127.0.0.1:")
    assert "8 of 8 requests answered" in told.out
    assert "trace at 50/s" in told.err
    result = json.loads(out.read_text())
    assert result["config"]["trace"] == str(trace)
    assert result["levels"][0]["output_tokens"]["mean"] == 5
    assert "secret" not in out.read_text()
    assert read_profile(profile).points[0].num_requests == 8


def test_a_run_that_cannot_be_trusted_fails_and_leaves_no_profile(url, tmp_path, capsys):
    profile = tmp_path / "profile.json"
    argv = ["bench", "serve", "--url", url, "--requests", "3", "--rate", "100", *SMALL]
    assert main([*argv, "--max-lag-ms", "0.000001", "--profile", str(profile)]) == 1
    assert "REFUSED" in capsys.readouterr().out
    assert not profile.exists()


@pytest.mark.parametrize(
    ("argv", "says"),
    [
        (["--model", "other"], "has no model other; it has: fake"),
        (["/no/such/trace"], "/no/such/trace: No such file or directory"),
        (["--token-ids", "600:700"], "outside the vocabulary"),
    ],
)
def test_a_failure_is_one_line(url, capsys, argv, says):
    assert main(["bench", "serve", "--url", url, *SMALL, *argv]) == 1
    *_, last = capsys.readouterr().err.splitlines()
    assert last.startswith("perilune: error: ")
    assert says in last


def test_nobody_at_the_address(capsys):
    address = free_address("127.0.0.1", 0)
    assert main(["bench", "serve", "--url", address.url]) == 1
    assert capsys.readouterr().err == (
        f"perilune: error: cannot reach {address.url}: Connect call failed {tuple(address)}\n"
    )


def test_the_load_generator_needs_no_torch():
    script = "import sys; sys.modules['torch'] = None; import perilune.cli.bench"
    subprocess.run([sys.executable, "-c", script], check=True, timeout=60)
