"""`perilune kernels`: the ops, what runs them, proof that it computes them, and how fast."""

from __future__ import annotations

import argparse

from perilune.cli import kernels_bench, kernels_check, kernels_list


def add_arguments(parser: argparse.ArgumentParser) -> None:
    actions = parser.add_subparsers(dest="action", required=True, metavar="ACTION")
    kernels_list.add_arguments(actions)
    kernels_check.add_arguments(actions)
    kernels_bench.add_arguments(actions)


def run(args: argparse.Namespace) -> int:
    """Runs the chosen action; 1 where a check is red.

    Raises:
        UnsupportedError: there is no op of the given name, or no such device here.
    """
    measuring = {"bench": kernels_bench.run_bench, "gate": kernels_bench.run_gate}
    others = {"list": kernels_list.run_list, "check": kernels_check.run_check}
    return (others | measuring)[args.action](args)
