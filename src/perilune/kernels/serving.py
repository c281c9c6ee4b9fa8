"""Which backend serves an op on a device, and why."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from perilune.core.errors import UnsupportedError
from perilune.kernels import plugins, verdict

if TYPE_CHECKING:
    from perilune.kernels.registry import OpSpec


class Choice(NamedTuple):
    """A plug-in that the user asks for."""

    backend: str
    by: str
    """How it was asked for."""


class Serving(NamedTuple):
    path: str
    """`module:attr`."""
    why: str
    plugin: plugins.Registered | None = None


def serving(declared: OpSpec, device: str, choice: Choice | None = None) -> Serving:
    """What runs `declared` on the device type `device`.

    Raises:
        UnsupportedError: the chosen plug-in may not serve there: it is missing, broken, of other
            devices, or not checked as it is now.
    """
    if choice is not None:
        return _chosen(declared, device, choice)
    if device in declared.backends:
        return Serving(declared.backends[device], "own, declared for it")
    return Serving(declared.reference, "reference, since no backend is declared for it")


def _chosen(declared: OpSpec, device: str, choice: Choice) -> Serving:
    found = plugins.find(declared.name, choice.backend)
    if device not in found.plugin.devices:
        served = ", ".join(found.plugin.devices)
        raise UnsupportedError(
            f"{found}, chosen by {choice.by}, serves {declared.name} on {served}, not on {device}"
        )
    checked = verdict.read(op_folder(declared), found, device)
    refused = f", {checked.refused} of {checked.checks} refused" if checked.refused else ""
    why = f"plug-in {found} chosen by {choice.by}, checked on {checked.date}{refused}"
    return Serving(found.plugin.run, why, found)


def op_folder(declared: OpSpec) -> Path:
    """Where the sources of an op lie."""
    found = find_spec(declared.reference.partition(":")[0])
    assert found is not None
    assert found.origin is not None
    return Path(found.origin).parent
