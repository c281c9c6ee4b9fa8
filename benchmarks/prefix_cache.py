"""The prefix cache on conversations of the Mooncake trace: hits beside ideal ones, and the time to
the first token with and without it, on the CPU.

    python benchmarks/prefix_cache.py TRACE [--sample N] [--out FILE]

Through the whole server: every `--sample`-th conversation of the trace (prompts that share the
second block; the first one is everybody's), all lengths by SCALE so that nano on a CPU answers in
seconds, in the trace's order. Three servers stay alive: with the cache, without it, and with so
little memory that states have to go. Each request goes to all of them, one after another, the first
of them changing: what else the machine does is in all alike, and no request waits for another.

Without a model: all prompts of the trace at full length through the same cache code.

Contents are told by blocks of 512 tokens, so prompts part at multiples of that: `--state-align` is
the block. What the server keeps by default, which knows no such grid, is measured beside it.
"""

from __future__ import annotations

import argparse
import os
import re
import signal
import subprocess
import sys
import time
import zlib
from collections.abc import Generator, Sequence
from contextlib import AsyncExitStack, ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import uvloop
from report import keep, provenance, spread

from perilune.cli.bench_prefix_cache import replayed
from perilune.engine.cache_sizes import STATE_SHARE
from perilune.engine.cost_model import CostModel
from perilune.engine.opening import RETENTION
from perilune.gateway.load.client import Asker, connected
from perilune.gateway.load.percentiles import percentiles
from perilune.gateway.load.prefix_oracle import ideal_hits
from perilune.gateway.load.prompts import IdPrompts
from perilune.gateway.load.sample import Sample
from perilune.gateway.load.traces import BLOCK_TOKENS, read_trace
from perilune.gateway.load.workload import Block, Request, scaled
from perilune.model.presets import preset

SCALE = 1 / 32
BLOCK = BLOCK_TOKENS // 32
ALIGNED = ("--state-align", str(BLOCK))
SERVERS: dict[str, tuple[str, ...]] = {
    "with_cache": ALIGNED,
    "without_cache": ("--no-prefix-cache",),
    "little_memory": (*ALIGNED, "--max-running", "8", "--cache", "0.18"),
}
WARM_UP = [Request(0.0, (Block("warm-up", 200),), 4)] * 3


def chosen(trace: Path, every: int) -> list[Request]:
    """Whole conversations. Prompts of a single block, which nothing tells apart, are left out."""
    traced = [r for r in read_trace(trace) if r.prompt_tokens > BLOCK_TOKENS]
    key = [zlib.crc32(str(request.block_ids[1]).encode()) for request in traced]
    return list(scaled([r for r, k in zip(traced, key, strict=True) if k % every == 0], SCALE))


@contextmanager
def serving(model_dir: str, options: Sequence[str]) -> Generator[str]:
    command = [sys.executable, "-m", "perilune.cli.main", "serve", model_dir, "--port", "0"]
    command += ["--threads", "1", "--device", "cpu", *options]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    found = re.search(r"http://\S+:\d+", process.stdout.readline())
    if found is None:
        raise SystemExit("the server did not start")
    try:
        yield found[0]
    finally:
        process.send_signal(signal.SIGTERM)
        process.wait()


async def ask_all(urls: Sequence[str], requests: Sequence[Request]) -> list[list[Sample]]:
    """For each request a sample of each server."""
    async with AsyncExitStack() as stack:
        clients = [await stack.enter_async_context(connected(url, None)) for url in urls]
        askers = [
            Asker(
                client,
                IdPrompts("prefix cache"),
                model_id="nano",
                endpoint="completions",
                timeout_s=600.0,
                max_retries=0,
                options={"temperature": 0, "ignore_eos": True},
            )
            for client in clients
        ]
        rows = []
        for number, request in enumerate(WARM_UP + list(requests)):
            row: dict[int, Sample] = {}
            for turn in range(len(askers)):
                which = (number + turn) % len(askers)
                row[which] = Sample(request=request, due_at=time.perf_counter())
                await askers[which].send(askers[which].prepare(request), row[which])
                if not row[which].is_ok:
                    raise SystemExit(f"{row[which].status}: {row[which].message}")
            rows.append([row[which] for which in range(len(askers))])
        return rows[len(WARM_UP) :]


def served(options: Sequence[str], samples: Sequence[Sample], ideal: float) -> dict[str, Any]:
    num_tokens = sum(sample.num_prompt for sample in samples)
    rate = sum(sample.cached_tokens or 0 for sample in samples) / num_tokens
    ttft = percentiles(sample.ttft_s for sample in samples)
    assert ttft is not None
    return {
        "options": " ".join(options),
        "ttft_s": {name: getattr(ttft, name) for name in ("mean", "p50", "p90", "p99")},
        "hit_rate": rate,
        "of_ideal": rate / ideal,
    }


def ratios(off: Sequence[Sample], on: Sequence[Sample]) -> dict[str, Any]:
    """TTFT without the cache over that with it, request by request."""
    pairs = [(a.ttft_s or 0.0, b.ttft_s or 1.0, b) for a, b in zip(off, on, strict=True)]
    kinds = {
        "half_cached_or_more": [a / b for a, b, s in pairs if _cached(s) >= 0.5],
        "less_cached": [a / b for a, b, s in pairs if _cached(s) < 0.5],
    }
    return {
        name: {"requests": len(values), **spread(values)}
        for name, values in kinds.items()
        if values
    }


def _cached(sample: Sample) -> float:
    return (sample.cached_tokens or 0) / sample.num_prompt


def whole_trace(trace: Path, sizes_gb: Sequence[float]) -> list[dict[str, Any]]:
    cost = CostModel.of(preset("nano"))
    requests = list(read_trace(trace))
    told = replace(RETENTION, align=BLOCK_TOKENS, min_gap=1)
    cases = [("--state-align 512 --state-share 0.1", told, 0.1), ("", RETENTION, STATE_SHARE)]
    rows: list[dict[str, Any]] = []
    for options, retention, share in cases:
        for gb in sizes_gb:
            got, ideal = replayed(
                requests, cost, num_bytes=int(gb * 1e9), state_share=share, retention=retention
            )
            rates = {hits.policy: hits.rate for hits in ideal}
            rows.append(
                {"options": options, "gb": gb, "states": got.num_slots, "hit_rate": got.rate}
                | {f"{name}_hit_rate": rate for name, rate in rates.items()}
                | {f"of_{name}": got.rate / rate for name, rate in rates.items()}
            )
            print(rows[-1], file=sys.stderr, flush=True)
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("trace", type=Path)
    parser.add_argument("--model", default="models/nano")
    parser.add_argument("--sample", type=int, default=160, help="one conversation in so many")
    parser.add_argument("--gb", type=float, nargs="*", default=[5, 10, 20, 80])
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    requests = chosen(args.trace, args.sample)
    before_load = os.getloadavg()[0]
    with ExitStack() as stack:
        urls = [stack.enter_context(serving(args.model, options)) for options in SERVERS.values()]
        rows = uvloop.run(ask_all(urls, requests))
    samples = dict(zip(SERVERS, zip(*rows, strict=True), strict=True))
    [ideal] = ideal_hits([request.blocks for request in requests], None)
    num_prompt = [request.prompt_tokens for request in requests]
    result: dict[str, Any] = {
        **provenance("torch", "numba", "granian"),
        "load_average": spread([before_load, os.getloadavg()[0]]),
        "trace": args.trace.name,
        "sample": f"one conversation in {args.sample}, prompts of more than {BLOCK_TOKENS} tokens",
        "scale": SCALE,
        "requests": len(requests),
        "prompt_tokens": {"mean": sum(num_prompt) / len(requests), **spread(num_prompt)},
        "ideal_hit_rate": ideal.rate,
        "served": {
            name: served(options, samples[name], ideal.rate) for name, options in SERVERS.items()
        },
        "ttft_without_over_with": ratios(samples["without_cache"], samples["with_cache"]),
        "whole_trace": whole_trace(args.trace, args.gb),
    }
    keep(result, args.out)


if __name__ == "__main__":
    main()
