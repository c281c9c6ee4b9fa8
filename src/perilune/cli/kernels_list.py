"""`perilune kernels list`: which backend serves which op on which device, and why."""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

from perilune.core.errors import UnsupportedError
from perilune.kernels.plugins import Broken, Registered, clash, load_all
from perilune.kernels.registry import OPS, OpSpec, choice, spec
from perilune.kernels.serving import op_folder, serving
from perilune.kernels.testing import is_here
from perilune.kernels.verdict import read

DEVICES = ("cpu", "cuda")


class Row(NamedTuple):
    what: str
    """A device type, or a plug-in."""
    path: str
    """`module:attr`; empty where nothing serves."""
    why: str
    is_reference: bool = False


def add_arguments(actions: Any) -> None:
    """Adds the command to the actions of `perilune kernels`."""
    listing = actions.add_parser("list", help="every op: what serves it on each device, and why")
    listing.add_argument(
        "--strict",
        action="store_true",
        help="exit status 1 where an op would run its plain reference on cuda, or nothing at all",
    )


def run_list(args: argparse.Namespace) -> int:
    """Prints every op; with `--strict` 1 where a GPU gets no kernel.

    Raises:
        ConfigError: PERILUNE_KERNELS is not of its form.
        UnsupportedError: it names an op that does not exist.
    """
    registered, broken = load_all()
    served = {name: list(serving_rows(spec(name))) for name in OPS}
    for name, rows in served.items():
        plugins = [each for each in registered if each.plugin.op == name]
        print(described(spec(name), [*rows, *plugin_rows(spec(name), plugins)]))
        print()
    strangers = [
        Broken(each.name, each.by, f"it is for op {each.plugin.op!r}, which is unknown here")
        for each in registered
        if each.plugin.op not in OPS
    ]
    for each in [*broken, *strangers]:
        print(f"plug-in {each}")
    lacking = list(_lacking(served)) if args.strict else []
    print(*lacking, sep="\n", end="\n" if lacking else "")
    return 1 if lacking else 0


def serving_rows(op: OpSpec) -> Iterator[Row]:
    """What runs `op` on each device type, or why nothing does."""
    chosen = choice(op.name)
    for device in DEVICES:
        try:
            found = serving(op, device, chosen)
        except UnsupportedError as error:
            yield Row(device, "", f"refused: {error}")
        else:
            yield Row(device, found.path, found.why, found.path == op.reference)


def plugin_rows(op: OpSpec, plugins: Sequence[Registered]) -> Iterator[Row]:
    """Each plug-in of `op`, and how far it is from serving."""
    for name in dict.fromkeys(each.name for each in plugins):
        same = [each for each in plugins if each.name == name]
        found = same[0]
        if len(same) > 1:
            yield Row(name, "", clash(same))
        elif found.version is None:
            yield Row(name, found.plugin.run, f"plug-in, {found.distribution} is not installed")
        else:
            for device in found.plugin.devices:
                yield Row(
                    name, found.plugin.run, f"plug-in for {device}, {_state(op, found, device)}"
                )


def _state(op: OpSpec, found: Registered, device: str) -> str:
    if not is_here(device):
        return f"which is not here: {found.distribution} {found.version} cannot be checked"
    try:
        verdict = read(op_folder(op), found, device)
    except UnsupportedError as error:
        return f"available but not served: {error}"
    how = f"choose it by PERILUNE_KERNELS={op.name}={found.name}"
    return f"{found.distribution} {found.version}, checked on {verdict.date}; {how}"


def described(op: OpSpec, rows: Sequence[Row]) -> str:
    """The entry of one op."""
    widths = [
        max(len(text) for text in column) for column in zip(*(row[:2] for row in rows), strict=True)
    ]
    lines = [f"{op.name}{op.signature}"]
    for what, path, why, _ in rows:
        named = f"{path:<{widths[1]}}  " if path else ""
        lines.append(f"  {what:<{widths[0]}}  {named}{why}")
    return "\n".join(lines)


def _lacking(served: dict[str, list[Row]]) -> Iterator[str]:
    """In a sentence each: the ops that have no kernel on cuda, and those that nothing serves."""
    on_cuda = [(name, row) for name, rows in served.items() for row in rows if row.what == "cuda"]
    plain = [name for name, row in on_cuda if row.is_reference]
    if plain:
        yield f"{len(plain)} op(s) would run the plain-torch reference on cuda: {', '.join(plain)}"
    unserved = [name for name, row in on_cuda if not row.path]
    if unserved:
        yield f"{len(unserved)} op(s) would not run on cuda at all: {', '.join(unserved)}"
