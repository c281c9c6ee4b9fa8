"""How other KDA kernels are called: the arguments that each wants for ours.

fla-core 0.6: `chunk_kda` with a state that is stored K first (so that it never hands over to
FlashKDA); FlashKDA: `fwd`, with states stored V first. Both compute gate, L2 norm and beta
themselves, and want gate parameters and states in fp32.

Legend: T packed tokens, B rows, L tokens of a row, N sequences, H heads, K key width, V value
width.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from perilune.kernels.common.packing import Cuts, Packing

MAX_GRID = 65535
"""Programs along any axis of a CUDA grid but the first: fla has B H of them there."""
IN_KERNEL = {
    "use_qk_l2norm_in_kernel": True,
    "use_gate_in_kernel": True,
    "use_beta_sigmoid_in_kernel": True,
}


class Prefill(NamedTuple):
    """The inputs of op `kda_chunk`."""

    q_THK: Tensor
    k_THK: Tensor
    v_THV: Tensor
    z_THK: Tensor
    b_TH: Tensor
    A_log_H: Tensor
    dt_bias_HK: Tensor
    packing: Packing
    lower_bound: float | None = None
    state_NHKV: Tensor | None = None
    cuts: Cuts | None = None


def fla_arguments(x: Prefill) -> dict[str, Any]:
    """Of `fla.ops.kda.chunk_kda`."""
    return (
        _rows(x)
        | IN_KERNEL
        | {
            "A_log": x.A_log_H.float(),
            "dt_bias": x.dt_bias_HK.float().flatten(),
            "scale": x.q_THK.shape[-1] ** -0.5,
            "initial_state": None if x.state_NHKV is None else x.state_NHKV.float(),
            "output_final_state": True,
            "safe_gate": x.lower_bound is not None,
            "lower_bound": x.lower_bound,
        }
    )


def flash_arguments(x: Prefill) -> dict[str, Any]:
    """Of `flash_kda.fwd`, which writes to `out` and `final_state`."""
    n, (h, k) = x.packing.num_sequences, x.dt_bias_HK.shape
    rows = {name: tensor.contiguous() for name, tensor in _rows(x).items()}
    arguments: dict[str, Any] = rows | {
        "A_log": x.A_log_H.float().contiguous(),
        "dt_bias": x.dt_bias_HK.float().contiguous(),
        "scale": k**-0.5,
        "lower_bound": x.lower_bound,
        "out": torch.empty_like(rows["v"]),
        "final_state": x.v_THV.new_empty(n, h, x.v_THV.shape[-1], k, dtype=torch.float32),
    }
    if x.state_NHKV is not None:
        arguments["initial_state"] = x.state_NHKV.float().mT.contiguous()
    return arguments


def _rows(x: Prefill) -> dict[str, Tensor]:
    """[T, ...] as [B, L, ...] where all are equally long, otherwise as one row with offsets."""
    packing = x.packing
    programs = packing.num_sequences * x.q_THK.shape[1]
    dense = packing.is_dense and programs <= MAX_GRID
    b = packing.num_sequences if dense else 1
    names = {"q": x.q_THK, "k": x.k_THK, "v": x.v_THV, "g": x.z_THK, "beta": x.b_TH}
    rows = {name: ours.view(b, -1, *ours.shape[1:]) for name, ours in names.items()}
    if not dense:
        rows["cu_seqlens"] = torch.tensor(packing.cu_seqlens).to(x.q_THK.device)
    return rows


def unbatched(o_BLHV: Tensor, state_NHKV: Tensor) -> list[Tensor]:
    """Outputs and states as ours."""
    return [o_BLHV.flatten(0, 1), state_NHKV]
