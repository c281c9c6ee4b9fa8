"""`perilune bench`: a server under traffic, prompts in the prefix cache, long contexts on a GPU,
layers on several."""

from __future__ import annotations

import argparse
import importlib
import sys

import uvloop

from perilune.cli.bench_contexts_options import add_contexts_options
from perilune.cli.bench_options import add_serve_options, load_test
from perilune.cli.bench_prefix_options import add_prefix_cache_options
from perilune.cli.bench_ranks_options import add_ranks_options
from perilune.core.env import api_key
from perilune.gateway.load.measure import measure
from perilune.gateway.load.open_files import allow_many
from perilune.gateway.load.report import markdown
from perilune.gateway.profiles import write_json

MODULES = {
    "prefix-cache": "perilune.cli.bench_prefix_cache",
    "contexts": "perilune.cli.bench_contexts",
    "ranks": "perilune.cli.bench_ranks",
}
"""Of actions that need what the engine needs."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    actions = parser.add_subparsers(dest="action", required=True, metavar="ACTION")
    serve = actions.add_parser(
        "serve", help="replay a trace against an OpenAI-compatible server and report latencies"
    )
    add_serve_options(serve)
    prefix_cache = actions.add_parser(
        "prefix-cache",
        help="replay a trace's prompts through the prefix cache, without a model, and report hits",
    )
    add_prefix_cache_options(prefix_cache)
    contexts = actions.add_parser(
        "contexts", help="time four layers at long contexts, beside all-MLA and grouped queries"
    )
    add_contexts_options(contexts)
    ranks = actions.add_parser(
        "ranks", help="time layers shared by the GPUs of a host, beside the same layers on one"
    )
    add_ranks_options(ranks)


def run(args: argparse.Namespace) -> int:
    """Runs the chosen action."""
    if args.action == "serve":
        return run_serve(args)
    return importlib.import_module(MODULES[args.action]).run(args)


def run_serve(args: argparse.Namespace) -> int:
    """1 where a load cannot be trusted: the generator was late, or nothing was answered.

    Raises:
        ConfigError: options, trace and server do not go together; the message says how.
    """
    test = load_test(args)
    allow_many()
    result = uvloop.run(measure(test, api_key=api_key(), tell=_tell))
    if args.out is not None:
        write_json(args.out, result)
    if args.profile is not None and result.profile is not None:
        write_json(args.profile, result.profile)
    print(markdown(result))
    return 0 if all(level.trusted for level in result.levels) else 1


def _tell(text: str) -> None:
    print(f"perilune: {text}", file=sys.stderr, flush=True)
