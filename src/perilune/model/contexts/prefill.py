"""One long prompt, prefilled in chunks over pools.

Legend: T tokens of a chunk, D model width.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import NamedTuple

import torch

from perilune.model.config import ModelConfig
from perilune.model.contexts.plan import HYBRID, stack_config
from perilune.model.contexts.stacks import Inputs
from perilune.model.model import DecoderLayer
from perilune.model.pools import Pools, StepOnPools
from perilune.model.step import PAGE, Prefilling


class Prefilled(NamedTuple):
    seconds: float
    """Of all chunks."""
    chunk_s: list[float]
    finite: bool
    """Outputs of the last chunk and the state behind it."""
    cache_bytes: int


@torch.inference_mode()
def prefill(
    config: ModelConfig,
    layers: Sequence[DecoderLayer],
    context: int,
    chunk: int,
    generator: torch.Generator,
    dtype: torch.dtype,
) -> Prefilled:
    """Of the hybrid stack. All chunks get the same vectors: what they see before them differs."""
    pages = -(-context // PAGE)
    pools = Pools.of(
        stack_config(config, HYBRID),
        slots=1,
        pages=pages + 1,
        device=generator.device,
        dtype=dtype,
    )
    chunk = min(chunk, context)
    assert context % chunk == 0, (context, chunk)
    order_J = torch.randperm(pages, generator=generator, device=generator.device) + 1
    table_J = order_J.int().cpu().numpy()
    inputs = Inputs(config, chunk, generator, dtype)

    def run(start: int) -> torch.Tensor:
        fed = Prefilling(0, table_J, start, chunk, num_logits=0)
        return inputs.through(layers, StepOnPools(pools.layers, pools.step([], [fed])).of)

    starts = range(0, context - chunk + 1, chunk)
    for start in {0, starts[-1]}:  # what is compiled at first use is not a prompt's to pay
        run(start)
    last_TD, chunk_s, begin = None, [], _now(generator.device)
    for start in starts:
        last_TD = run(start)
        end = _now(generator.device)
        chunk_s.append(end - begin)
        begin = end
    assert last_TD is not None
    finite = bool(torch.isfinite(last_TD).all() & torch.isfinite(pools.state_LSHKV).all())
    return Prefilled(sum(chunk_s), chunk_s, finite, pools.nbytes - pools.page_nbytes)


def _now(device: torch.device) -> float:
    """Once the device has done everything."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter()
