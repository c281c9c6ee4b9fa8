"""Result files: `{"env": {...}, "rows": [...]}`."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any, NamedTuple

from perilune.core.errors import UnsupportedError
from perilune.core.whole_file import write_whole
from perilune.kernels.bench.environment import COMPARABLE, require_comparable


@dataclass(frozen=True, kw_only=True)
class Row:
    """One implementation at one size, beside one peer."""

    op: str
    case: str
    """Of a part of a case: the case, a space, and which part."""
    backend: str
    median_ms: float
    p10_ms: float
    p90_ms: float
    floor_ms: float
    """By the ceilings measured in the same run."""
    peer: str | None = None
    peer_median_ms: float | None = None
    ratio: float | None = None
    """Peer over ours."""
    inside: str = ""
    """What is part of the timed call."""
    eager_ms: float | None = None
    """With the launch from Python, where `median_ms` is of a CUDA graph."""
    error: float | None = None
    """Relative, of outputs and states against the reference at this size."""
    peer_error: float | None = None
    gradient_error: float | None = None
    """Relative, the largest of all inputs' gradients."""
    peer_gradient_error: float | None = None
    peer_note: str = ""
    """Why a peer has no time, or how it was called."""
    marks: list[str] = field(default_factory=list)
    """What a reader has to know before believing the number."""
    clocks: dict[str, list[float]] | None = None
    """Lowest and highest clock, power and temperature seen meanwhile."""
    commit: str | None = None
    date: str = ""

    @property
    def key(self) -> tuple[str, str, str, str | None]:
        return self.op, self.case, self.backend, self.peer

    @property
    def measurement(self) -> tuple[str, str, str]:
        """What is measured at once: all peers and all parts of a case."""
        return self.op, self.case.partition(" ")[0], self.backend


class ResultFile(NamedTuple):
    env: dict[str, Any]
    rows: list[Row]


def default_path(env: Mapping[str, Any], folder: Path, what: str = "kernels") -> Path:
    """`<what>_<gpu>_<yyyymm>.json`."""
    name = re.sub(r"^(NVIDIA|AMD) ", "", env["gpu"])
    word = "cpu" if name.startswith("CPU") else name.split(" ")[0].lower()
    return folder / f"{what}_{word}_{env['date'][:7].replace('-', '')}.json"


def path_for(asked: Path, env: Mapping[str, Any], folder: Path, what: str = "kernels") -> Path:
    """`asked`, or the default path if that is `folder`."""
    return default_path(env, folder, what) if asked == folder else asked


def load(path: Path) -> ResultFile:
    """Raises:
    UnsupportedError: not a result file of this format.
    """
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
        known = {f.name for f in fields(Row)}
        rows = [Row(**{k: v for k, v in row.items() if k in known}) for row in content["rows"]]
        env = dict(content["env"])
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise UnsupportedError(f"{path} is no result file of kernels bench ({error})") from error
    return ResultFile(env, rows)


def save(path: Path, env: Mapping[str, Any], rows: Sequence[Row]) -> None:
    """Writes `rows`; what the file already holds of other ops, cases and backends stays. Of a case
    that is measured again nothing does: neither a peer nor a part that is no more.

    Raises:
        UnsupportedError: the file was measured on another GPU, driver or Triton.
    """
    kept: list[Row] = []
    peers = dict(env.get("peers", {}))
    if path.exists():
        stored = load(path)
        require_comparable(stored.env, env, path)
        peers = {**stored.env.get("peers", {}), **peers}
        fresh = {row.measurement for row in rows}
        kept = [row for row in stored.rows if row.measurement not in fresh]
    content = {"env": {**env, "peers": peers}, "rows": [asdict(row) for row in [*kept, *rows]]}
    path.parent.mkdir(parents=True, exist_ok=True)
    write_whole(path, (json.dumps(content, indent=1) + "\n").encode())


def describe(env: Mapping[str, Any]) -> str:
    """One line: where and with what."""
    facts = [f"{key} {env[key]}" for key in (*COMPARABLE[1:], "torch") if env.get(key)]
    peers = [f"{name} {version}" for name, version in env.get("peers", {}).items()]
    return ", ".join([env["gpu"], *facts, *peers, f"commit {env.get('commit')}", env["date"]])
