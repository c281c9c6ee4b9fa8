"""The toy op of `toy_triton` in plain torch: its reference, its truth and its traits."""

from __future__ import annotations

import torch

from perilune.kernels.common.cases import EXACT_FP32
from perilune.kernels.common.packing import Packing
from perilune.kernels.registry import OpSpec
from perilune.kernels.traits import Drafts, OneToken, Traits

DECAY, WIDTH, SPARE_SLOTS = 0.99, 6, 3


def forward(x_TD, weight_D, packing, state_ND=None):
    outputs, states = [x_TD[:0]], []
    for n, x_LD in enumerate(x_TD.split(packing.lengths)):
        s_D = x_TD.new_zeros(x_TD.shape[1]) if state_ND is None else state_ND[n].to(x_TD.dtype)
        for x_D in x_LD:
            s_D = DECAY * s_D + x_D / (1 + x_D.abs().sum())
            outputs.append(weight_D * s_D[None])
        states.append(s_D)
    return torch.cat(outputs), torch.stack(states)


def step(x_TD, weight_D, pool_SD, slot_N, keep_N=None):
    length = x_TD.shape[0] // max(1, len(slot_N))
    y_TD = torch.zeros_like(x_TD)
    for n, slot in enumerate(slot_N.tolist()):
        if slot < 0:
            continue
        rows = slice(n * length, (n + 1) * length)
        y_TD[rows], _ = forward(x_TD[rows], weight_D, Packing.of([length]), pool_SD[[slot]])
        kept = length if keep_N is None else int(keep_N[n])
        if kept:
            taken = slice(n * length, n * length + kept)
            states = forward(x_TD[taken], weight_D, Packing.of([kept]), pool_SD[[slot]])[1]
            pool_SD[slot] = states[0]
    return y_TD


def _make(generator, dtype, lengths, width):
    def draw(*shape):
        return torch.randn(shape, generator=generator, dtype=dtype)

    return {
        "x_TD": draw(sum(lengths), width),
        "weight_D": draw(width),
        "packing": Packing.of(lengths),
        "state_ND": draw(len(lengths), width),
    }


def _drafts(generator, dtype, n, length, width=WIDTH):
    inputs = _make(generator, dtype, (1,) * max(1, n * length), width)
    pool = torch.randn(n + SPARE_SLOTS, width, generator=generator, dtype=dtype)
    return {
        "x_TD": inputs["x_TD"][: n * length],
        "weight_D": inputs["weight_D"],
        "pool_SD": pool,
        "slot_N": torch.randperm(n + SPARE_SLOTS, generator=generator)[:n],
        "keep_N": None,
    }


def _one_token(inputs):
    return {
        "x_TD": inputs["x_TD"],
        "weight_D": inputs["weight_D"],
        "pool_SD": inputs["state_ND"],
        "slot_N": torch.zeros(1, dtype=torch.int64),
    }


FORWARD = Traits(
    make=_make,
    tokens={"x_TD": 0},
    sequences={"state_ND": 0},
    state_outputs={"state_ND": 1},
    packing="packing",
    widths=(WIDTH,),
    scaled=("x_TD",),
    one_token=OneToken("toy_op:step", ("pool_SD",), _one_token),
    batch_invariant={"cuda": 256},
)
STEP = Traits(
    make=lambda generator, dtype, lengths, width: _drafts(generator, dtype, sum(lengths), 1, width),
    tokens={"x_TD": 0},
    sequences={"slot_N": 0, "keep_N": 0},
    in_place=("pool_SD",),
    slots="slot_N",
    inert_slot=-1,
    widths=(WIDTH,),
    scaled=("x_TD",),
    drafts=Drafts(_drafts, "keep_N"),
    batch_invariant={"cuda": 256},
)


def toy_spec(name: str, backend: str) -> OpSpec:
    """`toy_forward` or `toy_step`, with `backend` (`module:attr`) for a GPU."""
    attr = name.removeprefix("toy_")
    lengths = (5, 1, 3) if attr == "forward" else (4,)
    make = {"forward": _make, "step": STEP.make}[attr]
    return OpSpec(
        name=name,
        signature="",
        reference=f"toy_op:{attr}",
        oracle=f"toy_op:{attr}",
        backends={"cuda": backend},
        cases={"plain": lambda generator, dtype: make(generator, dtype, lengths, WIDTH)},
        tolerance=EXACT_FP32,
        traits=f"toy_op:{attr.upper()}",
    )


STEP_SPEC = toy_spec("toy_step", "toy_triton:step")
