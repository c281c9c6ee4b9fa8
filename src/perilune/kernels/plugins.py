"""Backends from other packages: what they declare, and who is installed.

A package joins by an entry point of the group `perilune.kernels`. Its name is the backend's, and it
loads a `Plugin`, or a tuple of them, one an op. Nothing of a plug-in is imported before somebody
chooses it, checks it or lists all.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import wraps
from importlib import metadata
from typing import Any, NamedTuple

import torch
from torch import Tensor

from perilune.core.errors import UnsupportedError

GROUP = "perilune.kernels"
BUILT_IN = {
    "fla": "perilune.kernels.kda.plugins:FLA",
    "flash_kda": "perilune.kernels.kda.plugins:FLASH_KDA",
}
"""Bindings that come with perilune, of packages that may not be there."""
RESERVED = frozenset({"reference", "cpu", "cuda"})
"""Names of perilune's own backends."""
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_-]*")


@dataclass(frozen=True, kw_only=True)
class Plugin:
    """One backend of one op. What it claims here is checked, and its limits are kept for it."""

    op: str
    run: str
    """`module:attr` of a function with the op's signature. It may refuse inputs in an
    `UnsupportedError`; the module is Python source, and does not call the reference."""
    devices: tuple[str, ...]
    """Device types that it serves."""
    dtypes: tuple[torch.dtype, ...] = (torch.float32,)
    """Of the op's first tensor; the op has a tolerance for each."""
    gradients: bool = True
    """False: forward only. A call that needs a gradient is refused before it gets there."""
    distribution: str | None = None
    """Whose version counts, where that is not the package of the entry point."""
    rounding_sees_ahead: bool = False
    batch_invariant: int = 0
    graphs: bool = False
    """These three as in `Traits`, of this backend."""


class Registered(NamedTuple):
    name: str
    plugin: Plugin
    by: str
    """The distribution that registers it."""
    distribution: str
    """The one whose version counts."""
    version: str | None
    """None: not installed."""

    def __str__(self) -> str:
        return f"{self.name} ({self.distribution} {self.version or 'not installed'})"


class Broken(NamedTuple):
    """An entry point that loads no plug-in; it harms nobody who does not choose it."""

    name: str
    by: str
    reason: str

    def __str__(self) -> str:
        return f"{self.name} (registered by {self.by}) is broken: {self.reason}"


def find(op: str, name: str) -> Registered:
    """The plug-in `name` of `op`, installed or not.

    Raises:
        UnsupportedError: there is none, or more than one, or an entry point of that name is broken.
    """
    registered, broken = load_all(name)
    found = [each for each in registered if each.plugin.op == op]
    if len(found) > 1:
        raise UnsupportedError(clash(found))
    if found:
        return found[0]
    if broken:
        raise UnsupportedError("; ".join(map(str, broken)))
    known = [each.name for each in load_all().registered if each.plugin.op == op]
    have = f"; plug-ins for it: {', '.join(known)}" if known else ", and no plug-in for it"
    raise UnsupportedError(f"op {op} has no backend {name!r}{have}")


def clash(found: list[Registered]) -> str:
    """What is wrong with several plug-ins of one name for one op."""
    (name, plugin, *_), owners = found[0], " and ".join(each.by for each in found)
    return f"op {plugin.op} has two backends {name!r}, from {owners}: uninstall one of them"


class Loaded(NamedTuple):
    registered: list[Registered]
    broken: list[Broken]


def load_all(name: str | None = None) -> Loaded:
    """Every plug-in, or those of one name."""
    loaded = Loaded([], [])
    for entry, by in _entry_points():
        if name in (None, entry.name):
            try:
                loaded.registered.extend(_load(entry, by))
            # Somebody else's module may do anything while it is imported.
            except (Exception, SystemExit) as error:
                reason = f"{type(error).__name__}: {error}".partition("\n")[0]
                loaded.broken.append(Broken(entry.name, by, reason))
    return loaded


def _entry_points() -> Iterator[tuple[metadata.EntryPoint, str]]:
    for name, value in BUILT_IN.items():
        yield metadata.EntryPoint(name, value, GROUP), "perilune"
    for entry in metadata.entry_points(group=GROUP):
        yield entry, entry.dist.name if entry.dist is not None else "an unnamed distribution"


def _load(entry: metadata.EntryPoint, by: str) -> Iterator[Registered]:
    if entry.name in RESERVED or not _NAME.fullmatch(entry.name):
        raise UnsupportedError(f"no plug-in may be called {entry.name!r}")
    declared = entry.load()
    for plugin in declared if isinstance(declared, tuple) else (declared,):
        if not isinstance(plugin, Plugin):
            raise UnsupportedError(f"{entry.value} holds a {type(plugin).__name__}, not a Plugin")
        distribution = plugin.distribution or by
        yield Registered(entry.name, plugin, by, distribution, version_of(distribution))


def version_of(distribution: str) -> str | None:
    """Of an installed distribution; None: it is not there."""
    try:
        return metadata.version(distribution)
    except metadata.PackageNotFoundError:
        return None


def load_run(found: Registered) -> Callable[..., Any]:
    """The function of a plug-in, within the limits that it declares.

    Raises:
        UnsupportedError: it cannot be imported.
    """
    try:
        run = metadata.EntryPoint(found.name, found.plugin.run, GROUP).load()
    except (ImportError, AttributeError) as error:
        raise UnsupportedError(f"{found} cannot be loaded: {error}") from error
    return within_limits(run, found)


def within_limits(run: Callable[..., Any], found: Registered) -> Callable[..., Any]:
    """`run`, refusing dtypes that were not checked and, if forward only, gradients."""
    plugin = found.plugin

    @wraps(run)
    def guarded(*args: Any, **kwargs: Any) -> Any:
        tensors = [x for x in (*args, *kwargs.values()) if isinstance(x, Tensor)]
        if tensors and tensors[0].dtype not in plugin.dtypes:
            served = ", ".join(map(_plain, plugin.dtypes))
            given = _plain(tensors[0].dtype)
            raise UnsupportedError(f"{found} serves {plugin.op} in {served}, not in {given}")
        asked = torch.is_grad_enabled() and any(x.requires_grad for x in tensors)
        if asked and not plugin.gradients:
            raise UnsupportedError(f"{found} serves {plugin.op} forward only, without gradients")
        return run(*args, **kwargs)

    return guarded


def _plain(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
