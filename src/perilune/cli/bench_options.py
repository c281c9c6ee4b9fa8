"""The options of `perilune bench serve`, and the load test they make."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from pathlib import Path

from perilune.cli.local_model import positive_int
from perilune.cli.result_options import positive
from perilune.cli.sampling_options import temperature
from perilune.core.errors import ConfigError
from perilune.gateway.load.level import Limits
from perilune.gateway.load.plan import LoadTest
from perilune.gateway.load.prompts import END_ID, FIRST_ID
from perilune.gateway.load.workload import Bounds, Load

DEFAULT_SECONDS = 60.0
DEFAULT_RATE = 1.0


def add_serve_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "trace",
        nargs="?",
        type=Path,
        metavar="TRACE",
        help="Azure CSV or Mooncake JSON lines, also gzipped (default: requests of fixed lengths)",
    )
    _add_target(parser)
    _add_load(parser)
    _add_lengths(parser)
    _add_judgement(parser)


def _add_target(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("server")
    group.add_argument("--url", default="http://localhost:8000", help="(%(default)s)")
    group.add_argument("--model", metavar="ID", help="(default: the first that the server offers)")
    group.add_argument("--endpoint", choices=("completions", "chat"), default="completions")
    group.add_argument(
        "--prompt",
        choices=("ids", "text"),
        help="token ids, or words for servers that take none (default: ids, for chat text)",
    )
    group.add_argument(
        "--token-ids",
        type=_id_range,
        default=(FIRST_ID, END_ID),
        metavar="FIRST:END",
        help=f"ids that prompts are made of ({FIRST_ID}:{END_ID})",
    )
    group.add_argument("--timeout", type=positive, default=600.0, metavar="S", help="(600)")
    group.add_argument(
        "--retry-429", type=_count, default=0, metavar="N", help="send again, N times at most (0)"
    )
    group.add_argument("--temperature", type=temperature, default=1.0, metavar="T", help="(1)")
    group.add_argument(
        "--may-stop", action="store_true", help="do not ask for answers of exactly the length given"
    )
    group.add_argument("--hardware", metavar="TEXT", help="what the server runs on, for the report")


def _add_load(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("load", "Several values, as in 1,2,4: one run each.")
    group.add_argument(
        "--arrivals",
        choices=("trace", "poisson", "constant"),
        help="(default: trace, without one poisson)",
    )
    pace = group.add_mutually_exclusive_group()
    pace.add_argument("--rate", type=_list_of(positive), metavar="R", help="mean requests/s")
    pace.add_argument(
        "--speed", type=_list_of(positive), metavar="X", help="of the trace's own times (1)"
    )
    pace.add_argument(
        "--concurrency",
        type=_list_of(positive_int),
        metavar="N",
        help="closed loop: N requests at a time, each after an answer",
    )
    group.add_argument("--requests", type=positive_int, metavar="N", help="send at most N")
    group.add_argument(
        "--seconds",
        type=positive,
        metavar="S",
        help=f"let requests arrive for S seconds (default: {DEFAULT_SECONDS:g} without --requests)",
    )
    group.add_argument("--warmup", type=_count, default=1, metavar="N", help="requests before (1)")
    group.add_argument("--seed", type=int, default=0, help="of arrivals and prompts (0)")


def _add_lengths(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("lengths")
    group.add_argument("--skip", type=_count, default=0, metavar="N", help="requests of the trace")
    group.add_argument(
        "--scale-tokens", type=positive, default=1.0, metavar="F", help="lengths of the trace (1)"
    )
    group.add_argument("--prompt-tokens", type=positive_int, default=512, metavar="N", help="(512)")
    group.add_argument("--output-tokens", type=positive_int, default=64, metavar="N", help="(64)")
    group.add_argument(
        "--max-context",
        type=positive_int,
        metavar="N",
        help="leave out longer requests (default: as the server's model card says)",
    )


def _add_judgement(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("report")
    group.add_argument("--slo-ttft-ms", type=positive, metavar="MS", help="for goodput")
    group.add_argument("--slo-tpot-ms", type=positive, metavar="MS", help="for goodput")
    group.add_argument(
        "--max-lag-ms",
        type=positive,
        metavar="MS",
        help="p99 of the generator's lag beyond which a run is refused (default: a tenth of the "
        "median time to first token, at least 10)",
    )
    group.add_argument(
        "--cache-tokens",
        type=positive_int,
        metavar="N",
        help="the ideal prefix hits of a cache of this size too",
    )
    group.add_argument("--out", type=Path, metavar="FILE", help="everything, as JSON")
    group.add_argument(
        "--profile", type=Path, metavar="FILE", help="the performance profile, as JSON"
    )


def load_test(args: argparse.Namespace) -> LoadTest:
    """Raises ConfigError: options that exclude each other, or a folder that is not there."""
    for path in filter(None, (args.out, args.profile)):
        if not path.parent.is_dir():
            raise ConfigError(f"{path.parent} is not a directory")
    form = args.prompt or ("text" if args.endpoint == "chat" else "ids")
    if form == "ids" and args.endpoint == "chat":
        raise ConfigError("--endpoint chat takes no token ids: use --prompt text")
    first_id, end_id = args.token_ids
    seconds = args.seconds
    if seconds is None and args.requests is None:
        seconds = DEFAULT_SECONDS
    return LoadTest(
        url=args.url,
        model_id=args.model,
        endpoint=args.endpoint,
        prompt_form=form,
        first_id=first_id,
        end_id=end_id,
        trace=args.trace,
        prompt_tokens=args.prompt_tokens,
        output_tokens=args.output_tokens,
        skip=args.skip,
        scale_tokens=args.scale_tokens,
        max_context=args.max_context,
        loads=_loads(args),
        bounds=Bounds(num_requests=args.requests, seconds=seconds),
        limits=Limits(
            slo_ttft_s=_in_s(args.slo_ttft_ms),
            slo_tpot_s=_in_s(args.slo_tpot_ms),
            max_lag_s=_in_s(args.max_lag_ms),
        ),
        cache_tokens=args.cache_tokens,
        seed=args.seed,
        num_warmup=args.warmup,
        timeout_s=args.timeout,
        max_retries=args.retry_429,
        temperature=args.temperature,
        ignore_eos=not args.may_stop,
        hardware=args.hardware,
    )


def _loads(args: argparse.Namespace) -> tuple[Load, ...]:
    if args.concurrency is not None:
        if args.arrivals is not None:
            raise ConfigError("--concurrency is a closed loop: it has no --arrivals")
        return tuple(Load(arrivals="closed", concurrency=number) for number in args.concurrency)
    arrivals = args.arrivals or ("poisson" if args.trace is None else "trace")
    if arrivals == "trace":
        if args.trace is None:
            raise ConfigError("--arrivals trace needs a TRACE")
        if args.rate is None:
            return tuple(Load(arrivals="trace", speed=speed) for speed in args.speed or (1.0,))
    elif args.speed is not None:
        raise ConfigError(f"--speed is of a trace's own arrivals: {arrivals} ones have a --rate")
    return tuple(Load(arrivals=arrivals, rate=rate) for rate in args.rate or (DEFAULT_RATE,))


def _in_s(time_ms: float | None) -> float | None:
    return None if time_ms is None else time_ms / 1e3


def _count(text: str) -> int:
    value = int(text)
    if value < 0:
        raise argparse.ArgumentTypeError(f"{value} is less than 0")
    return value


def _id_range(text: str) -> tuple[int, int]:
    first, _, end = text.partition(":")
    return _count(first), positive_int(end)


def _list_of(one: Callable[[str], float]) -> Callable[[str], tuple[float, ...]]:
    """For argparse: several values with commas between them."""

    def values(text: str) -> tuple[float, ...]:
        return tuple(one(part) for part in text.split(","))

    return values
