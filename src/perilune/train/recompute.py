"""Activation checkpointing: a layer keeps its inputs, and runs again for its backward pass.

A backward pass stands outside of `Balancing.counting`, so that routers count nothing twice.
"""

from __future__ import annotations

from torch.utils.checkpoint import checkpoint

from perilune.kernels.common.packing import Packing
from perilune.model.attn_res import AttnResStream, PlainStream
from perilune.model.model import DecoderLayer

Stream = AttnResStream | PlainStream


def recomputed(layer: DecoderLayer, stream: Stream, packing: Packing, at: None) -> Stream:
    """`DecoderLayer.__call__` for a training pass."""

    def run() -> Stream:
        return layer(stream.copy(), packing, at)

    return checkpoint(run, use_reentrant=False, preserve_rng_state=False)
