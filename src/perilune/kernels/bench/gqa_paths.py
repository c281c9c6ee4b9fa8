"""Ways to decode with grouped-query attention, and the fastest of them: what MLA stands beside.

Legend: N sequences, H query heads, G key-value heads, L cached tokens, D head width.

A peer that is slower than need be would flatter: torch's own attention in every form that reads a
key once for all its query heads, and a kernel in Triton for where it is far from the roofline.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

from perilune.kernels.bench.contender import Contender, GraphContender
from perilune.kernels.bench.errors import DishonestError
from perilune.kernels.bench.rounds import spread
from perilune.kernels.bench.stopwatch import Stopwatch

Attend = Callable[[Tensor, Tensor, Tensor], Tensor]
"""(q_NHD, k_NGLD, v_NGLD) to o_NHD; scores are scaled by D^-0.5, every token is seen."""
REPEATS = 5
MOST_APART = 0.02
"""Relative, of bf16 outputs."""
CUDNN_NUMBERS = 1 << 31
"""Of keys: cuDNN is not asked about more, since a fault there would end the process."""


class Fastest(NamedTuple):
    name: str
    attend: Attend
    tried: dict[str, float | str]
    """Seconds of a call of each way, or why it has none."""


def paths(device: torch.device) -> dict[str, Attend]:
    """By name: those that there are on `device`."""
    if device.type != "cuda":
        return {"torch SDPA": partial(grouped_rows, backend=SDPBackend.MATH)}
    from perilune.kernels.bench.triton_gqa import TILES, attend

    flash, cudnn = SDPBackend.FLASH_ATTENTION, SDPBackend.CUDNN_ATTENTION
    tiles = {f"Triton split-KV {tile.tokens}x{tile.warps}": tile for tile in TILES}
    return {
        "torch SDPA flash, heads as rows": partial(grouped_rows, backend=flash),
        "torch SDPA flash, enable_gqa": partial(grouped_heads, backend=flash),
        "torch SDPA cuDNN, heads as rows": partial(grouped_rows, backend=cudnn),
        "torch SDPA cuDNN, enable_gqa": partial(grouped_heads, backend=cudnn),
        **{name: partial(attend, tile=tile) for name, tile in tiles.items()},
    }


def grouped_rows(q_NHD: Tensor, k_NGLD: Tensor, v_NGLD: Tensor, backend: SDPBackend) -> Tensor:
    """The query heads of a key-value head as so many query tokens: nothing is expanded."""
    q_NGJD = q_NHD.unflatten(1, (k_NGLD.shape[1], -1))
    with sdpa_kernel(backend):
        return scaled_dot_product_attention(q_NGJD, k_NGLD, v_NGLD).flatten(1, 2)


def grouped_heads(q_NHD: Tensor, k_NGLD: Tensor, v_NGLD: Tensor, backend: SDPBackend) -> Tensor:
    with sdpa_kernel(backend):
        o_NH1D = scaled_dot_product_attention(q_NHD[:, :, None], k_NGLD, v_NGLD, enable_gqa=True)
    return o_NH1D[:, :, 0]


@torch.inference_mode()
def fastest(
    ways: Mapping[str, Attend],
    q_NHD: Tensor,
    caches: Sequence[tuple[Tensor, Tensor]],
    watch: Stopwatch,
) -> Fastest:
    """The one with the shortest median of those that compute what they should, over keys and
    values of several layers in turn; in a graph where there are graphs.

    Raises:
        DishonestError: none does.
    """
    made = GraphContender if q_NHD.is_cuda else Contender
    tried: dict[str, float | str] = {}
    for name, attend in ways.items():
        if "cuDNN" in name and caches[0][0].numel() >= CUDNN_NUMBERS:
            tried[name] = "not asked about so many keys"
            continue
        try:
            require_right(name, attend(q_NHD, *caches[0]), q_NHD, *caches[0])
            contender = made(name, [partial(attend, q_NHD, *cache) for cache in caches])
            contender.round()
            times = [watch.time(contender.round).seconds for _ in range(REPEATS)]
        except (RuntimeError, DishonestError) as error:
            tried[name] = str(error).splitlines()[0]
            continue
        tried[name] = spread(times).median / len(caches)
    took = {name: each for name, each in tried.items() if isinstance(each, float)}
    if not took:
        raise DishonestError(f"no way to decode with grouped queries: {tried}")
    name = min(took, key=took.__getitem__)
    return Fastest(name, ways[name], tried)


def require_right(name: str, o_NHD: Tensor, q_NHD: Tensor, k_NGLD: Tensor, v_NGLD: Tensor) -> None:
    """Of the last key-value head of the last sequence, which has the largest addresses.

    Raises:
        DishonestError: the output is another one.
    """
    group = q_NHD.shape[1] // k_NGLD.shape[1]
    q_JD, k_LD, v_LD = (x.float() for x in (q_NHD[-1, -group:], k_NGLD[-1, -1], v_NGLD[-1, -1]))
    want_JD = torch.softmax(q_JD @ k_LD.t() * q_JD.shape[1] ** -0.5, dim=-1) @ v_LD
    error = float((o_NHD[-1, -group:].float() - want_JD).norm() / want_JD.norm())
    if not error <= MOST_APART:
        raise DishonestError(f"{name} is {error:.1e} from the truth")
