"""fla-core and FlashKDA as backends of op `kda_chunk`, where they are installed.

Legend: T packed tokens, N sequences, H heads, K key width, V value width.
"""

from __future__ import annotations

from importlib import import_module
from typing import Any

import torch

from perilune.core.errors import UnsupportedError
from perilune.kernels.kda.peers import Prefill, fla_arguments, flash_arguments, unbatched
from perilune.kernels.kda.reference import KDAOut
from perilune.kernels.plugins import Plugin

FLA_WIDTHS = (16, 32, 64, 128, 256)
FLASH_WIDTHS = (128,)
LOWEST_BOUND = -5.0
"""Of the gate a token: below it, exponents of a tile leave the range of fp32."""

FLA = Plugin(
    op="kda_chunk",
    run=f"{__name__}:fla_chunk",
    devices=("cuda",),
    dtypes=(torch.bfloat16,),
    distribution="fla-core",
    rounding_sees_ahead=True,
)
FLASH_KDA = Plugin(
    op="kda_chunk",
    run=f"{__name__}:flash_kda",
    devices=("cuda",),
    dtypes=(torch.bfloat16,),
    gradients=False,
    distribution="flash_kda",
    rounding_sees_ahead=True,
)


def fla_chunk(*args: Any, **inputs: Any) -> KDAOut:
    """As `reference.kda_chunk`, by `fla.ops.kda.chunk_kda`, with gradients.

    Raises:
        UnsupportedError: segmented rows, a sequence without a token, an unbounded gate or one below
            -5, or another width than a power of two from 16 to 256.
    """
    x = Prefill(*args, **inputs)
    _require_served(x, "fla", FLA_WIDTHS)
    chunk_kda = import_module("fla.ops.kda").chunk_kda
    return KDAOut(*unbatched(*chunk_kda(**fla_arguments(x))))


def flash_kda(*args: Any, **inputs: Any) -> KDAOut:
    """As `reference.kda_chunk`, by `flash_kda.fwd`, forward only.

    Raises:
        UnsupportedError: segmented rows, a sequence without a token, an unbounded gate or one below
            -5, or another width than 128.
    """
    x = Prefill(*args, **inputs)
    _require_served(x, "FlashKDA", FLASH_WIDTHS)
    arguments = flash_arguments(x)
    import_module("flash_kda").fwd(**arguments)
    return KDAOut(*unbatched(arguments["out"], arguments["final_state"].mT))


def _require_served(x: Prefill, who: str, served: tuple[int, ...]) -> None:
    widths = x.q_THK.shape[-1], x.v_THV.shape[-1]
    if x.packing.segment_BL is not None:
        raise UnsupportedError(f"{who} does not reset states inside a row: no segmented rows")
    if x.cuts is not None:
        raise UnsupportedError(f"{who} has no states but the last: no cuts")
    if min(x.packing.lengths) < 1:
        raise UnsupportedError(f"{who} is given no sequence without a token")
    if x.lower_bound is None or not LOWEST_BOUND <= x.lower_bound < 0:
        raise UnsupportedError(
            f"{who} is trusted with gates bounded by {LOWEST_BOUND:g} to 0 only, not by"
            f" {'nothing' if x.lower_bound is None else f'{x.lower_bound:g}'}"
        )
    if any(width not in served for width in widths):
        known = ", ".join(map(str, served))
        raise UnsupportedError(f"{who} serves widths of {known}, not K={widths[0]} V={widths[1]}")
