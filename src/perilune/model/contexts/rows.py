"""The file of results: `{"env": {...}, "decode": [...], "prefill": [...]}`."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from perilune.core.errors import UnsupportedError
from perilune.core.whole_file import write_whole
from perilune.kernels.bench.environment import require_comparable


@dataclass(frozen=True, kw_only=True)
class DecodeRow:
    stack: str
    context: int
    num_sequences: int
    is_full: bool
    """As many sequences as the budget of memory holds."""
    budget_bytes: int
    step_ms: float
    """Median, of a graph's replays where there are graphs."""
    p10_ms: float
    p90_ms: float
    floor_ms: float
    """Of the roofline, by the ceilings of the same run."""
    floor_parts_ms: dict[str, float]
    steady_ms: float
    """A step on, with the host's work for the next."""
    kernels_ms: float | None
    """In which some kernel of a step ran."""
    largest_kernels_ms: dict[str, float]
    cache_bytes: int
    """That the pools allocate for the sequences."""
    info_bytes: int
    """The same as `perilune model info` computes it."""
    weight_bytes: int
    peak_bytes: int | None
    """Of the GPU's memory, everything included."""
    experts_chosen: list[int]
    """Different ones, in each layer."""
    experts_expected: float
    """In a layer, if choices were independent and alike."""
    attention: str
    """What serves it."""
    attention_ms: dict[str, float | str]
    """Of one layer, every way that was tried."""
    clocks: dict[str, list[float]] | None
    marks: list[str] = field(default_factory=list)
    commit: str | None
    date: str

    @property
    def tokens_per_s(self) -> float:
        return 1e3 * self.num_sequences / self.step_ms

    @property
    def of_roofline(self) -> float:
        return self.floor_ms / self.step_ms

    @property
    def key(self) -> tuple[str, int, int]:
        return self.stack, self.context, self.num_sequences


@dataclass(frozen=True, kw_only=True)
class PrefillRow:
    stack: str
    context: int
    chunk: int
    seconds: float
    floor_s: float
    """Of its matrix products, at the measured rate."""
    first_chunk_ms: float
    last_chunk_ms: float
    finite: bool
    cache_bytes: int
    weight_bytes: int
    peak_bytes: int | None
    commit: str | None
    date: str

    @property
    def tokens_per_s(self) -> float:
        return self.context / self.seconds

    @property
    def key(self) -> tuple[str, int, int]:
        return self.stack, self.context, self.chunk


class ResultFile(NamedTuple):
    env: dict[str, Any]
    decode: list[DecodeRow]
    prefill: list[PrefillRow]


def load(path: Path) -> ResultFile:
    """Raises:
    UnsupportedError: not a result file of this format.
    """
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
        decode = [DecodeRow(**row) for row in content["decode"]]
        prefill = [PrefillRow(**row) for row in content["prefill"]]
        return ResultFile(dict(content["env"]), decode, prefill)
    except (ValueError, KeyError, TypeError) as error:
        raise UnsupportedError(f"{path} is no result file of bench contexts ({error})") from error


def save(path: Path, env: Mapping[str, Any], row: DecodeRow | PrefillRow) -> None:
    """Adds `row`, in the place of one of the same sizes; all others stay.

    Raises:
        UnsupportedError: the file was measured on another GPU, driver or Triton.
    """
    decode: list[DecodeRow] = []
    prefill: list[PrefillRow] = []
    if path.exists():
        stored = load(path)
        require_comparable(stored.env, env, path)
        _, decode, prefill = stored
    if isinstance(row, DecodeRow):
        decode = [*(r for r in decode if r.key != row.key), row]
    else:
        prefill = [*(r for r in prefill if r.key != row.key), row]
    content = {
        "env": dict(env),
        "decode": [asdict(r) for r in sorted(decode, key=lambda r: r.key)],
        "prefill": [asdict(r) for r in sorted(prefill, key=lambda r: r.key)],
    }
    path.parent.mkdir(parents=True, exist_ok=True)
    write_whole(path, (json.dumps(content, indent=1) + "\n").encode())
