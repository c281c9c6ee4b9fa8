"""Absorbed decoding on a GPU: programs that leave parts, then their merge.

Legend: N sequences, Q query tokens of each, H heads, C latent width.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache

import torch
import triton
from torch import Tensor

from perilune.kernels.common.triton_math import is_hopper, uses_ptx
from perilune.kernels.mla import cuda_decode, triton_decode_plain
from perilune.kernels.mla.triton_decode_merge import merge
from perilune.kernels.mla.triton_decode_plan import Parts, Plan, num_programs, plan_of
from perilune.kernels.mla.triton_decode_rows import Rows

MANY_ROWS = 512
"""From here on a merging program takes a whole row, else a few channels of all its parts."""
FEW_CHANNELS, MOST_PARTS = 32, 128
GLUON = "3.6."
"""The Triton whose Gluon the programs with roles are written in: others call things otherwise."""
Launch = Callable[[Tensor, Rows, Parts, float, Plan], None]


def attend(
    q_NQHC: Tensor,
    rows: Rows,
    scale: float,
    plan: Plan | None = None,
    launch: Launch | None = None,
) -> Tensor:
    """The mixed latents [N, Q, H, C]. By default `plan` and `launch` are what serves best."""
    n, q, h, _ = q_NQHC.shape
    c, device = rows.c_PSC.shape[2], q_NQHC.device
    if launch is None:
        launch = launch_of(q_NQHC, rows)
    if plan is None:
        plan = plan_for(launch, q * h, q_NQHC.dtype, num_programs(device))
    slots = (plan.teams + n) * q * h
    parts = Parts(
        q_NQHC.new_empty(n + 1, dtype=torch.int32),
        q_NQHC.new_empty(slots * c, dtype=torch.float32),
        q_NQHC.new_empty(slots, dtype=torch.float32),
    )
    o_NQHC = q_NQHC.new_empty(n, q, h, c)
    launch(q_NQHC, rows, parts, scale, plan)
    many = n * q * h >= MANY_ROWS
    channels = triton.next_power_of_2(c) if many else min(FEW_CHANNELS, triton.next_power_of_2(c))
    merge[(n * q * h * triton.cdiv(c, channels),)](
        parts.partial,
        parts.lse,
        parts.begin,
        o_NQHC,
        n,
        plan.teams,
        ROWS=q * h,
        C=c,
        BC=channels,
        BP=4 if many else triton.next_power_of_2(min(plan.teams, MOST_PARTS)),
        PTX=uses_ptx(device),
        num_warps=4,
    )
    return o_NQHC


def launch_of(q_NQHC: Tensor, rows: Rows) -> Launch:
    """On Hopper, K3's rows are for programs in CUDA C++ where heads are whole tiles of theirs, else
    for programs with roles; plain ones take everything else."""
    if cuda_decode.serves(q_NQHC, rows):
        return cuda_decode.launch
    device = q_NQHC.device
    aligned = q_NQHC.data_ptr() % 16 == 0
    if device.type == "cuda" and has_roles(device) and aligned and rows.come_in_boxes:
        from perilune.kernels.mla import triton_decode_roles

        return triton_decode_roles.launch
    return triton_decode_plain.launch


def plan_for(launch: Launch, rows: int, dtype: torch.dtype, programs: int) -> Plan:
    """Of programs that `launch` starts; otherwise as `plan_of`."""
    if launch is cuda_decode.launch:
        return cuda_decode.plan_of(rows, programs)
    return plan_of(rows, dtype, programs)


@cache
def has_roles(device: torch.device) -> bool:
    """Whether programs with roles run: their products are Hopper's alone."""
    return triton.__version__.startswith(GLUON) and is_hopper(device)
