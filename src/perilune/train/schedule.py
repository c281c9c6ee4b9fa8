"""The learning rate as a function of the step: nothing to save, nothing to resume."""

from __future__ import annotations

import math

from perilune.train.config import OptimConfig


def lr_at(step: int, steps: int, config: OptimConfig) -> float:
    """Of step number `step`, from 0. Rises linearly, and falls to the final rate, which step number
    `steps` would have: along half a cosine, or linearly at the end ("wsd")."""
    rising = (step + 1) / max(1, config.warmup_steps)
    falling = _cosine(step, steps, config) if config.schedule == "cosine" else 1.0
    if config.schedule == "wsd":
        falling = min(1.0, (steps - step) / max(1, steps * config.decay_ratio))
    final = config.final_lr_ratio
    return config.peak_lr * min(1.0, rising, final + (1 - final) * falling)


def _cosine(step: int, steps: int, config: OptimConfig) -> float:
    """1 in the last step of the warm-up, 0 in step number `steps`."""
    since, length = step + 1 - config.warmup_steps, steps + 1 - config.warmup_steps
    return (1 + math.cos(math.pi * min(1.0, max(0, since) / max(1, length)))) / 2
