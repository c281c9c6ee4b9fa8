"""`perilune serve`: one model behind the HTTP front, its engine in a process of its own."""

from __future__ import annotations

import argparse
import asyncio
import gc
import logging
import signal
import sys
from collections.abc import Mapping
from typing import Any

import uvloop

from perilune.cli.cache_options import add_cache_options, cache_options
from perilune.cli.local_model import OpenModel, add_run_options, positive_int, start_model
from perilune.gateway.app import Gateway
from perilune.gateway.router import Route, Router
from perilune.gateway.server import Address, free_address, listening
from perilune.telemetry.metrics import ServerMetrics

GRACE_S = 10.0
"""How long requests under way may go on after the first signal."""

MAX_RUNNING = 32

SWITCH_INTERVAL_S = 0.001
"""While a thread encodes a long prompt, every token of every stream waits so long for Python's
lock. Python's own 5 ms are as long as a step."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "model_dir",
        nargs="?",
        metavar="MODEL_DIR",
        help="checkpoint directory (default: the bundled nano)",
    )
    parser.add_argument("--host", default="127.0.0.1", help="address to listen on (%(default)s)")
    parser.add_argument("--port", type=int, default=8000, help="0 takes a free one (%(default)s)")
    parser.add_argument(
        "--max-running",
        type=positive_int,
        default=MAX_RUNNING,
        metavar="N",
        help="sequences that are decoded together (%(default)s)",
    )
    parser.add_argument(
        "--tensor-parallel",
        type=positive_int,
        default=1,
        metavar="N",
        help="GPUs of this host that share the model (%(default)s)",
    )
    add_cache_options(parser)
    add_run_options(parser)


def run(args: argparse.Namespace) -> int:
    logging.basicConfig(level=logging.WARNING, format="perilune: %(levelname)s: %(message)s")
    address = free_address(args.host, args.port)  # a taken port should not cost a load first
    sys.setswitchinterval(SWITCH_INTERVAL_S)
    uvloop.run(_serve(args, address))
    return 0


async def _serve(args: argparse.Namespace, address: Address) -> None:
    opened = await start_model(
        args,
        max_running=args.max_running,
        tensor_parallel=args.tensor_parallel,
        **cache_options(args),
    )
    model, engine = opened
    gc.freeze()  # what is loaded stays: going through it holds every stream up
    gateway = _gateway(opened)
    signals = _watch_signals()
    try:
        async with listening(gateway, address):
            print(_ready(model.model_id, model.max_context, address))
            print(_kernels(engine.info.details), flush=True)
            await signals.acquire()
            await _drain(gateway, signals)
            await engine.close()  # before the server ends: it waits for open streams
    finally:
        await engine.close()


def _gateway(opened: OpenModel) -> Gateway:
    model, engine = opened
    metrics = ServerMetrics()
    metrics.watch_engine(model.model_id, engine.stats)
    route = Route(
        model=model, max_context=model.max_context, failure=lambda: engine.stats().failure
    )
    return Gateway(Router([route]), metrics)


def _watch_signals() -> asyncio.Semaphore:
    """Released once for every SIGINT and SIGTERM."""
    signals = asyncio.Semaphore(0)
    loop = asyncio.get_running_loop()
    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, signals.release)
    return signals


async def _drain(gateway: Gateway, signals: asyncio.Semaphore) -> None:
    """Waits for the requests under way, up to GRACE_S or the next signal."""
    print("perilune: stopping; once more to stop at once", file=sys.stderr, flush=True)
    tasks = [
        asyncio.create_task(gateway.drain(GRACE_S)),
        asyncio.create_task(signals.acquire()),
    ]
    await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
    for task in tasks:
        task.cancel()


def _kernels(details: Mapping[str, Any]) -> str:
    """One line for what the registry logs op by op: which of the model's ops have a backend for
    the device."""
    device, size = details["device"], details["tensor_parallel"]
    kind = device.partition(":")[0]
    if size > 1:
        device = f"{size} x {kind}"
    parts = [
        f"{what} for {', '.join(names)}"
        for what, names in (
            (f"{kind} kernels", details["own_kernels"]),
            ("the reference", details["reference_kernels"]),
        )
        if names
    ]
    return f"perilune: on {device}: {'; '.join(parts)}"


def _ready(model_id: str, max_context: int, address: Address) -> str:
    url = address.reachable_url
    body = f'{{"model": "{model_id}", "messages": [{{"role": "user", "content": "Hello"}}]}}'
    return (
        f"perilune: serving {model_id} ({max_context} tokens of context) at {url}; try\n"
        f"curl {url}/v1/chat/completions -H 'content-type: application/json' -d '{body}'"
    )
