"""torch.compile where it pays: attention, feed-forward and the loss head, each on its own.

One graph of the whole step is no faster and takes minutes to compile: layers of one kind share
their code here.
"""

from __future__ import annotations

from functools import partial

import torch
from torch import nn

from perilune.model.model import Transformer
from perilune.train.loss import head_loss
from perilune.train.step import LossFunction, batch_loss

_MAX_VARIANTS = 64
"""Versions of one function, before the compiler gives up: a layer may need its own."""


def compile_parts(model: Transformer, backend: str = "inductor") -> LossFunction:
    """Compiles the layers of `model` in place and returns the `batch_loss` that goes with it."""
    torch.compiler.config.recompile_limit = _MAX_VARIANTS
    for layer in model.model.layers:
        feed_forward = layer.block_sparse_moe if layer.is_moe else layer.mlp
        for part in (layer.self_attn, feed_forward):
            assert isinstance(part, nn.Module)
            part.compile(dynamic=False, backend=backend)
    return partial(batch_loss, head=torch.compile(head_loss, dynamic=False, backend=backend))
