"""The options of a server about what it keeps of prompts, as the engine takes them."""

from __future__ import annotations

import argparse
from typing import Any


def add_cache_options(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("cache", "What is kept of prompts: docs/prefix-cache.md")
    group.add_argument(
        "--no-prefix-cache", action="store_true", help="compute every prompt from its first token"
    )
    group.add_argument(
        "--cache",
        type=gigabytes,
        metavar="GB",
        help="memory for states and latents, of what runs and of what is kept (default: on a CPU "
        "up to 0.5, on a GPU most of what is free)",
    )
    group.add_argument(
        "--state-share",
        type=float,
        metavar="X",
        help="of it for states that are kept, beside one for each of --max-running (0.5)",
    )
    group.add_argument(
        "--state-interval", type=_count, metavar="N", help="a state every N tokens (8192; 0: none)"
    )
    group.add_argument(
        "--state-align",
        type=_count,
        metavar="N",
        help="a state at a prompt's last multiple of N (64; 0: none)",
    )
    group.add_argument(
        "--host-cache",
        type=gigabytes,
        metavar="GB",
        help="host memory behind the prefix cache (default: none, or 0.25 with --disk-cache)",
    )
    group.add_argument(
        "--disk-cache", metavar="DIR", help="keeps there what host memory has no room for"
    )


def cache_options(args: argparse.Namespace) -> dict[str, Any]:
    """Those that were given; the engine knows the others."""
    options = {
        "prefix_cache": False if args.no_prefix_cache else None,
        "cache_bytes": args.cache,
        "state_share": args.state_share,
        "state_interval": args.state_interval,
        "state_align": args.state_align,
        "host_cache_bytes": args.host_cache,
        "disk_cache": args.disk_cache,
    }
    return {name: value for name, value in options.items() if value is not None}


def gigabytes(text: str) -> int:
    """Bytes. For argparse, which words the error with the function's name."""
    value = float(text)
    if not 0 <= value < 1e6:
        raise argparse.ArgumentTypeError(f"{text} is no number of gigabytes")
    return int(value * 2**30)


def _count(text: str) -> int:
    value = int(text)
    if value < 0:
        raise argparse.ArgumentTypeError(f"{value} is less than 0")
    return value
