"""Global state of torch that changes how fast, or how exactly, everything is computed."""

from __future__ import annotations

from typing import Any

import torch


def ambient() -> dict[str, Any]:
    """To be compared before and after: a kernel has no business changing any of it."""
    return {
        "default dtype": torch.get_default_dtype(),
        "threads": torch.get_num_threads(),
        "fp32 matmul precision": torch.get_float32_matmul_precision(),
        "cudnn TF32": torch.backends.cudnn.allow_tf32,
        "cudnn benchmark": torch.backends.cudnn.benchmark,
        "deterministic": torch.are_deterministic_algorithms_enabled(),
        "gradients": torch.is_grad_enabled(),
        "bf16 reduction": torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction,
    }


def changed(before: dict[str, Any], after: dict[str, Any]) -> list[str]:
    return [name for name, value in before.items() if after[name] != value]
