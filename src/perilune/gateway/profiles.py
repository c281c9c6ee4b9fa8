"""Performance profiles: how fast a model answers at an endpoint, by load and prompt length.

`perilune bench serve` writes them; whoever chooses between endpoints reads them.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

import msgspec
from msgspec import Meta, Struct

from perilune.core.errors import ConfigError
from perilune.core.whole_file import write_whole

Seconds = Annotated[float, Meta(ge=0)]
Rate = Annotated[float, Meta(ge=0)]
Tokens = Annotated[int, Meta(ge=0)]
Share = Annotated[float, Meta(ge=0, le=1)]

FORMAT = "perilune-profile-1"


class Quantiles(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Seconds that so many percent of the requests stayed within."""

    p50: Seconds
    p90: Seconds
    p95: Seconds
    p99: Seconds


class LoadPoint(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The requests of one range of prompt lengths under one load."""

    load: str
    """In words, e.g. `poisson at 4/s`."""
    offered_rate: Rate | None
    """Arrivals of all lengths, requests/s; None in a closed loop, where answers bring them."""
    concurrency: Annotated[float, Meta(ge=0)]
    """Mean number of requests in flight, of all lengths."""
    min_prompt_tokens: Tokens
    max_prompt_tokens: Tokens
    num_requests: Tokens
    failed: Share
    ttft_s: Quantiles | None
    """From the time a request was due to its first output; None where none had any."""
    tpot_s: Quantiles | None
    """Mean time of a request's tokens after the first."""
    requests_per_s: Rate
    prompt_tokens_per_s: Rate
    output_tokens_per_s: Rate
    """These three count answered requests of this range of lengths."""
    cached: Share | None
    """Share of the prompt tokens that a prefix cache served; None where the server does not say."""


class PerformanceProfile(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One model at one endpoint, as measured once."""

    format: Literal["perilune-profile-1"] = FORMAT
    model: str
    endpoint: str
    """URL of the server."""
    measured_at: str
    """ISO 8601, with the offset from UTC."""
    hardware: str
    software: dict[str, str]
    workload: str
    """Trace, scale and lengths, in words."""
    points: tuple[LoadPoint, ...]
    """By load; of each, first all lengths together, then range by range."""


_DECODER = msgspec.json.Decoder(PerformanceProfile)


def read_profile(path: Path) -> PerformanceProfile:
    """Raises:
    ConfigError: the file is no profile of this format; names what is wrong.
    OSError: it cannot be read.
    """
    try:
        return _DECODER.decode(path.read_bytes())
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path} is no performance profile: {error}") from None


def write_json(path: Path, value: Struct) -> None:
    """A profile, or another struct, indented; a reader never sees half of it."""
    write_whole(path, msgspec.json.format(msgspec.json.encode(value), indent=1) + b"\n")
