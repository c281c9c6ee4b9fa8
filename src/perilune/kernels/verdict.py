"""What the checklist said of a plug-in, kept between runs: it serves what was checked, no more.

A record is of one op, backend and device. It counts while everything that it was made with is the
same: versions, the op's sources, the checklist's, the plug-in's, the GPU.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterable
from datetime import UTC, datetime
from importlib import metadata
from importlib.util import find_spec
from pathlib import Path

import msgspec
import torch

from perilune.core.env import cache_dir, triton_is_interpreted
from perilune.core.errors import UnsupportedError
from perilune.core.whole_file import write_whole
from perilune.kernels.plugins import Registered, version_of

KERNELS = Path(__file__).parent
_SHARED = ("common", "testing")
_CODE = (".py", ".cu", ".cuh")


class Verdict(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """All checks were green."""

    made_with: dict[str, str]
    date: str
    """Day in UTC."""
    checks: int
    refused: int
    """Inputs among them that the backend declines in a clear error."""
    seed: int


def read(op_folder: Path, found: Registered, device: str) -> Verdict:
    """The verdict on `found` for the device type `device`, as everything is now.

    Raises:
        UnsupportedError: there is none that counts; the sentence says why, and what to run.
    """
    op, name = found.plugin.op, found.name
    again = f"run `perilune kernels check {op} --backend {name}`"
    if found.version is None:
        raise UnsupportedError(
            f"backend {name} of {op} needs {found.distribution}, which is not installed"
        )
    path, now = path_of(found, device), made_with(op_folder, found, device)
    try:
        verdict = msgspec.json.decode(path.read_bytes(), type=Verdict)
    except FileNotFoundError:
        where = now["device"]
        raise UnsupportedError(f"{found} is not checked for {op} on {where}: {again}") from None
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise UnsupportedError(
            f"the record of the check of {found} for {op} is damaged ({path}: {error}): {again}"
        ) from error
    was = verdict.made_with
    changed = [what for what in dict.fromkeys([*now, *was]) if now.get(what) != was.get(what)]
    if changed:
        told = "; ".join(_changes(changed, was, now))
        raise UnsupportedError(f"{found} changed since it was checked for {op} ({told}): {again}")
    return verdict


def write(
    op_folder: Path, found: Registered, device: str, *, checks: int, refused: int, seed: int
) -> Path:
    """Keeps that everything was green; whole or not at all, whenever the process ends."""
    verdict = Verdict(
        made_with=made_with(op_folder, found, device),
        date=datetime.now(UTC).date().isoformat(),
        checks=checks,
        refused=refused,
        seed=seed,
    )
    path = path_of(found, device)
    path.parent.mkdir(parents=True, exist_ok=True)
    write_whole(path, msgspec.json.format(msgspec.json.encode(verdict)))
    return path


def forget(found: Registered, device: str) -> None:
    """A red check takes an earlier green one back."""
    path_of(found, device).unlink(missing_ok=True)


def path_of(found: Registered, device: str) -> Path:
    where = re.sub(r"[^A-Za-z0-9]+", "-", device_name(device))
    return cache_dir() / "verdicts" / f"{found.plugin.op}.{found.name}.{where}.json"


def device_name(device: str) -> str:
    """A device type and, of a GPU, its model."""
    gpu = device == "cuda" and torch.cuda.is_available()
    return f"cuda, {torch.cuda.get_device_name()}" if gpu else device


def made_with(op_folder: Path, found: Registered, device: str) -> dict[str, str]:
    """What a verdict depends on; values are told to a reader, but for those that are digests."""
    triton = version_of("triton") or "not installed"
    shared = [path for name in _SHARED for path in (KERNELS / name).rglob("*.py")]
    facts = {
        "device": device_name(device),
        found.distribution: found.version or "",
        found.by: version_of(found.by) or "",
        "perilune": version_of("perilune") or "",
        "torch": str(torch.__version__),
        "triton": f"{triton}, interpreted" if triton_is_interpreted() else triton,
        "source of the op": _digest(x for x in op_folder.iterdir() if x.suffix in _CODE),
        "source of the checks": _digest([*shared, KERNELS / "traits.py"]),
        "files of the plug-in": _record(found.distribution),
    }
    if found.by != "perilune":
        facts["source of the plug-in"] = _digest(_sources(found.plugin.run))
    return facts


def _changes(names: list[str], was: dict[str, str], now: dict[str, str]) -> list[str]:
    """In words; that files differ goes without saying where a version does."""
    plain = [name for name in names if not name.startswith(("source of", "files of"))]
    told = [f"{name} {was.get(name)} then, {now.get(name)} now" for name in plain]
    return told or [f"the {name}" for name in names]


def _digest(files: Iterable[Path]) -> str:
    digest = hashlib.sha256()
    for file in sorted(files):
        digest.update(file.name.encode() + b"\0" + file.read_bytes() + b"\0")
    return digest.hexdigest()[:16]


def _record(distribution: str) -> str:
    """Another build of the same version has other files."""
    listed = metadata.distribution(distribution).read_text("RECORD") or ""
    return hashlib.sha256(listed.encode()).hexdigest()[:16]


def _sources(run: str) -> list[Path]:
    """Every Python file of the package that `run` is in, found without an import of it."""
    found = find_spec(run.partition(":")[0].partition(".")[0])
    if found is None or found.origin is None:
        return []
    roots = found.submodule_search_locations
    return [Path(found.origin)] if roots is None else [*Path(roots[0]).rglob("*.py")]
