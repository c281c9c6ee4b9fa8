"""The experts' outputs of a token added up, in fp32 and in the order of its choices.

Legend: T tokens, R experts a token, P pairs in the experts' order, L output width.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from perilune.kernels.experts.triton_schedule import early

WIDEST = 1024


def combine(
    out_PL: Tensor, place_TR: Tensor, weight_TR: Tensor | None, dtype: torch.dtype
) -> Tensor:
    """sum_r weight[t, r] out[place[t, r]], in the order of the choices; -1 is no place, and
    without weights each is one."""
    (t, r), width = place_TR.shape, out_PL.shape[1]
    y_TL = out_PL.new_empty(t, width, dtype=dtype)
    block = min(WIDEST, triton.next_power_of_2(width))
    _combine[(t * triton.cdiv(width, block),)](
        out_PL,
        place_TR,
        weight_TR,
        y_TL,
        WIDTH=width,
        R=r,
        BLOCK=block,
        num_warps=4,
        **early(out_PL.device),
    )
    return y_TL


@triton.jit
def _combine(
    out_p,
    place_p,
    weight_p,
    y_p,
    WIDTH: tl.constexpr,
    R: tl.constexpr,
    BLOCK: tl.constexpr,
    EARLY: tl.constexpr,
):
    if EARLY:
        gdc_wait()
        gdc_launch_dependents()
    BLOCKS: tl.constexpr = (WIDTH + BLOCK - 1) // BLOCK
    t = (tl.program_id(0) // BLOCKS).to(tl.int64)
    l_ = (tl.program_id(0) % BLOCKS) * BLOCK + tl.arange(0, BLOCK)
    y_L = tl.zeros([BLOCK], tl.float32)
    for r in tl.static_range(R):
        place = tl.load(place_p + t * R + r)
        if weight_p is None:
            weight = 1.0
        else:
            weight = tl.load(weight_p + t * R + r).to(tl.float32)
        here_L = l_ < tl.where(place >= 0, WIDTH, 0)
        out_L = tl.load(out_p + place.to(tl.int64) * WIDTH + l_, mask=here_L, other=0.0)
        # A masked zero stays zero, whatever the weight of nobody's pair is.
        y_L += tl.where(here_L, weight * out_L.to(tl.float32), 0.0)
    tl.store(y_p + t * WIDTH + l_, y_L.to(y_p.dtype.element_ty), mask=l_ < WIDTH)
