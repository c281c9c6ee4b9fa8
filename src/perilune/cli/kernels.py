"""`perilune kernels`: the ops, what runs them, proof that it computes them, and how fast."""

from __future__ import annotations

import argparse

from perilune.cli import kernels_bench, kernels_check
from perilune.kernels.registry import OPS, OpSpec, spec


def add_arguments(parser: argparse.ArgumentParser) -> None:
    actions = parser.add_subparsers(dest="action", required=True, metavar="ACTION")
    actions.add_parser("list", help="every op: signature, reference, backends by device")
    kernels_check.add_arguments(actions)
    kernels_bench.add_arguments(actions)


def run(args: argparse.Namespace) -> int:
    """Runs the chosen action; 1 where a check is red.

    Raises:
        UnsupportedError: there is no op of the given name, or no such device here.
    """
    measuring = {"bench": kernels_bench.run_bench, "gate": kernels_bench.run_gate}
    return ({"list": _list, "check": kernels_check.run_check} | measuring)[args.action](args)


def _list(args: argparse.Namespace) -> int:
    print("\n\n".join(describe(spec(name)) for name in OPS))
    return 0


def describe(op: OpSpec) -> str:
    """The entry of one op in `kernels list`."""
    rows = [("reference", op.reference), *sorted(op.backends.items())]
    lines = [f"  {name:<10} {path}" for name, path in rows]
    return "\n".join([f"{op.name}{op.signature}", *lines])
