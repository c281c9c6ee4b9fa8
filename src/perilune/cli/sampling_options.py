"""Options of the commands that sample."""

from __future__ import annotations

import argparse

from perilune.core.types import SamplingParams


def add_sampling_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--temperature",
        type=temperature,
        default=0.7,
        metavar="T",
        help="0 takes the likeliest token (%(default)s)",
    )
    parser.add_argument(
        "--top-p", type=_probability, default=1.0, metavar="P", help="nucleus size (%(default)s)"
    )
    parser.add_argument("--seed", type=int, metavar="N", help="the same seed gives the same text")


def sampling_of(args: argparse.Namespace) -> SamplingParams:
    return SamplingParams(temperature=args.temperature, top_p=args.top_p, seed=args.seed)


def temperature(text: str) -> float:
    """For argparse, which words the error with the function's name."""
    value = float(text)
    if not 0 <= value <= 2:
        raise argparse.ArgumentTypeError(f"{text} is outside 0..2")
    return value


def _probability(text: str) -> float:
    value = float(text)
    if not 0 < value <= 1:
        raise argparse.ArgumentTypeError(f"{text} is outside 0..1")
    return value
