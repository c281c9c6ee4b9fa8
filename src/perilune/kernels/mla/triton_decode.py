"""Absorbed decoding on a GPU: wide and narrow programs beside each other, then the merge.

Legend: N sequences, Q query tokens of each, H heads, C latent width.

The narrow programs have a stream of their own, which joins before the merge.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import torch
import triton
from torch import Tensor

from perilune.kernels.common.triton_math import uses_ptx
from perilune.kernels.mla import triton_decode_programs
from perilune.kernels.mla.triton_decode_merge import merge
from perilune.kernels.mla.triton_decode_plan import Plan, num_programs, plan_of
from perilune.kernels.mla.triton_decode_rows import Rows

MANY_ROWS = 512
"""From here on a merging program takes a whole row, else a few channels of all its parts."""
FEW_CHANNELS, MOST_PARTS = 32, 128
PREFERS_ROLES = False
"""Whether programs whose warp groups have roles serve what they can."""
ROLES_CHANNELS = (512, 64)
Launches = tuple[Callable[..., None], Callable[..., None]]
"""Of the wide and the narrow programs."""


def attend(
    q_NQHC: Tensor,
    rows: Rows,
    scale: float,
    plan: Plan | None = None,
    tma: bool | None = None,
    launches: Launches | None = None,
) -> Tensor:
    """The mixed latents [N, Q, H, C]. By default `plan`, `tma` and `launches` are what serves
    best."""
    n, q, h, _ = q_NQHC.shape
    c, device = rows.c_PSC.shape[2], q_NQHC.device
    if plan is None:
        plan = plan_of(q * h, q_NQHC.dtype, num_programs(device), rows.rate_PS is None)
    if tma is None:
        tma = device.type == "cuda" and not plan.in_chunks and rows.tile_by_tile(plan.tokens)
    descriptors = rows.descriptors(plan.tokens) if tma else (None, None)
    fp32: dict[str, Any] = {"dtype": torch.float32}
    wide_slots = (plan.teams + n) * plan.wide_members * plan.wide_rows
    narrow_slots = (plan.teams + n) * plan.narrow_members * plan.narrow_rows
    partial = q_NQHC.new_empty((wide_slots + narrow_slots) * c, **fp32)
    lse = q_NQHC.new_empty(wide_slots + narrow_slots, **fp32)
    # Tiles before each sequence; behind them, how far the teams' programs of each kind are.
    begin = q_NQHC.new_empty(n + 1 + 2 * plan.teams, dtype=torch.int32)
    o_NQHC = q_NQHC.new_empty(n, q, h, c)
    parts = (descriptors, begin, partial, lse)
    launch_wide, launch_narrow = launches or launches_of(rows, tma)
    if plan.wide_rows and plan.narrow_rows and device.type == "cuda":
        side, main = _side_stream(device), torch.cuda.current_stream(device)
        side.wait_stream(main)
        launch_wide(q_NQHC, rows, parts, scale, plan)
        with torch.cuda.stream(side):
            launch_narrow(q_NQHC, rows, parts, scale, plan, wide_slots)
        main.wait_stream(side)
    else:
        if plan.wide_rows:
            launch_wide(q_NQHC, rows, parts, scale, plan)
        if plan.narrow_rows:
            launch_narrow(q_NQHC, rows, parts, scale, plan, wide_slots)
    many = n * q * h >= MANY_ROWS
    channels = triton.next_power_of_2(c) if many else min(FEW_CHANNELS, triton.next_power_of_2(c))
    most = plan.teams * plan.most_members
    merge[(n * q * h * triton.cdiv(c, channels),)](
        partial,
        lse,
        begin,
        o_NQHC,
        n,
        plan.teams,
        wide_slots * c,
        wide_slots,
        plan.wide_members,
        plan.narrow_members,
        ROWS=q * h,
        WIDE_ROWS=plan.wide_rows,
        C=c,
        BC=channels,
        BP=4 if many else triton.next_power_of_2(min(most, MOST_PARTS)),
        PTX=uses_ptx(device),
        num_warps=4,
    )
    return o_NQHC


def launches_of(rows: Rows, tma: bool) -> Launches:
    """Programs with roles take K3's rows, whole ones, as the copy engine fetches them."""
    if PREFERS_ROLES and tma and rows.are_whole(*ROLES_CHANNELS):
        from perilune.kernels.mla import triton_decode_roles_narrow, triton_decode_roles_wide

        return triton_decode_roles_wide.launch_wide, triton_decode_roles_narrow.launch_narrow
    return triton_decode_programs.launch_wide, triton_decode_programs.launch_narrow


@cache
def _side_stream(device: torch.device) -> torch.cuda.Stream:
    """Of another priority: it is none of the pool that a graph is captured on."""
    return torch.cuda.Stream(device, priority=-1)
