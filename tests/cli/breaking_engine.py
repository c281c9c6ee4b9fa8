"""An engine whose model breaks at a Y, for good at a Z, and takes its process along at a K."""

from __future__ import annotations

import os
import signal

import torch

from perilune.core.types import TokenTable
from perilune.engine.host import Opened
from perilune.engine.opening import open_core as open_sound_core
from perilune.model.model import Transformer

_run = Transformer.step


def _step(self, token_ids_T, *args, **kwargs):
    if (token_ids_T == ord("Y")).any():
        raise ValueError("a step broke")
    if (token_ids_T == ord("Z")).any():
        raise torch.AcceleratorError("the device is lost")
    if (token_ids_T == ord("K")).any():
        os.kill(os.getpid(), signal.SIGKILL)
    return _run(self, token_ids_T, *args, **kwargs)


def open_core(*, model_dir: str, token_table: TokenTable | None = None, **options) -> Opened:
    Transformer.step = _step
    return open_sound_core(model_dir, token_table=token_table, **options)
