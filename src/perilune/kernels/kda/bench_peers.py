"""Other KDA kernels as peers, at their best setting.

fla-core 0.6: `chunk_kda` on its Triton path, and the recurrence of `fused_recurrent_kda`, state in
place. FlashKDA: `fwd`.
"""

from __future__ import annotations

from importlib import import_module
from typing import Any

import torch
from torch import Tensor

from perilune.kernels.bench.cases import Bound, Peer
from perilune.kernels.bench.inputs import projection
from perilune.kernels.kda.peers import (
    IN_KERNEL,
    Prefill,
    fla_arguments,
    flash_arguments,
    unbatched,
)
from perilune.kernels.registry import Inputs

TRAINED = (
    "q_THK",
    "k_THK",
    "v_THV",
    "z_THK",
    "b_TH",
    "A_log_H",
    "dt_bias_HK",
    "state_NHKV",
)


def _peer(name: str, distribution: str, module: str, function: str) -> Peer:
    bind = f"{__name__}:{function}"
    return Peer(name=name, distribution=distribution, module=module, bind=bind)


FLA_CHUNK = _peer("fla chunk_kda", "fla-core", "fla", "fla_chunk")
FLA_KEPT = _peer("fla chunk_kda, nothing recomputed", "fla-core", "fla", "fla_chunk_kept")
FLA_DECODE = _peer("fla fused_recurrent_kda", "fla-core", "fla", "fla_decode")
FLASH = _peer("FlashKDA", "flash_kda", "flash_kda", "flash_kda")


def fla_chunk(inputs: Inputs, backward: bool) -> Bound:
    return _fla_chunk(inputs, backward, kept=False)


def fla_chunk_kept(inputs: Inputs, backward: bool) -> Bound:
    """Keeps every intermediate for the backward pass: more memory, less time."""
    return _fla_chunk(inputs, backward, kept=True)


def _fla_chunk(inputs: Inputs, backward: bool, *, kept: bool) -> Bound:
    chunk_kda = import_module("fla.ops.kda").chunk_kda
    arguments = fla_arguments(Prefill(**inputs)) | {"disable_recompute": kept}
    if not backward:
        return Bound(lambda: chunk_kda(**arguments), _as_ours)
    leaves = [inputs[name] for name in TRAINED]
    grad_outputs: list[Tensor] = []

    def call() -> Any:
        o_BLHV, state_NHKV = chunk_kda(**arguments)
        if not grad_outputs:
            of_o = projection(o_BLHV.detach().flatten(0, 1)).view_as(o_BLHV)
            grad_outputs.extend([of_o, projection(state_NHKV.detach())])
        grads = torch.autograd.grad([o_BLHV, state_NHKV], leaves, grad_outputs)
        return o_BLHV, state_NHKV, grads

    return Bound(
        call, lambda out: unbatched(*out[:2]), lambda out: dict(zip(TRAINED, out[2], strict=True))
    )


def _as_ours(out: Any) -> list[Tensor]:
    return unbatched(*out)


def fla_decode(inputs: Inputs, backward: bool) -> Bound:
    """One token of N sequences; the recurrence alone, without convolution and norm."""
    forward = import_module("fla.ops.kda.fused_recurrent").fused_recurrent_kda_fwd
    names = {"q": "q_NHK", "k": "k_NHK", "v": "v_NHV", "g": "z_NHK", "beta": "b_NH"}
    arguments = {name: inputs[ours][:, None] for name, ours in names.items()}
    arguments |= IN_KERNEL | {
        "A_log": inputs["A_log_H"],
        "dt_bias": inputs["dt_bias_HK"].flatten(),
        "scale": inputs["q_NHK"].shape[-1] ** -0.5,
        "initial_state": inputs["state_NHKV"],
        "inplace_final_state": True,
        "lower_bound": inputs["lower_bound"],
        "out": torch.empty_like(arguments["v"]),
    }
    return Bound(lambda: forward(**arguments), lambda out: [out[0][:, 0]])


def flash_kda(inputs: Inputs, backward: bool) -> Bound:
    run = import_module("flash_kda").fwd
    arguments = flash_arguments(Prefill(**inputs))

    def call() -> Any:
        run(**arguments)
        return arguments["out"], arguments["final_state"].mT

    return Bound(call, _as_ours)
