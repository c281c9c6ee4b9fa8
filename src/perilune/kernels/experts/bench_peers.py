"""Other ways to run routed experts.

torch's grouped products take bf16 weights, dequantised beforehand. Humming multiplies MXFP4 itself:
its indexed products, with the tile that its heuristics choose and the pairs' order made beforehand,
between the GLU and the weighted sum of ours.
"""

from __future__ import annotations

from collections.abc import Iterator
from importlib import import_module
from typing import Any, NamedTuple

import torch
from torch import Tensor

from perilune.kernels.bench.cases import Bound, Peer
from perilune.kernels.experts import grouped
from perilune.kernels.experts.tiles import COLUMNS, ROWS, Packed, untiled, values
from perilune.kernels.registry import Inputs, resolve

situ_glu = resolve("situ")


def torch_grouped(inputs: Inputs, backward: bool) -> Bound:
    w13_E2IL, w2_ELI = dequantised(inputs)
    arguments = [inputs[name] for name in ("x_TL", "expert_TR", "weight_TR")]
    arguments += [w13_E2IL, w2_ELI, inputs["beta"], inputs["linear_beta"]]
    return Bound(lambda: grouped.experts(*arguments), lambda y_TL: [y_TL])


def dequantised(inputs: Inputs) -> tuple[Tensor, Tensor]:
    """w13 [E, 2I, L] and w2 [E, L, I] in bf16, made an expert at a time."""
    w13_EMKW, w2_EMKW = inputs["w13_EMKW"], inputs["w2_EMKW"]
    width = inputs["x_TL"].shape[1]
    rows, inner = w13_EMKW.shape[1] * ROWS, w2_EMKW.shape[2] * COLUMNS
    w13 = _bf16(w13_EMKW, rows, width, gated=True)
    return w13, _bf16(w2_EMKW, width, inner, gated=False)[..., : rows // 2]


def _bf16(tiles_EMKW: Tensor, rows: int, columns: int, *, gated: bool) -> Tensor:
    shape = (tiles_EMKW.shape[0], rows, columns)
    weights = torch.empty(shape, dtype=torch.bfloat16, device=tiles_EMKW.device)
    for expert, packed in enumerate(_each(tiles_EMKW, rows, columns, gated)):
        weights[expert] = values(packed, torch.bfloat16)[0]
    return weights


def _each(tiles_EMKW: Tensor, rows: int, columns: int, gated: bool) -> Iterator[Packed]:
    """One expert after the other: what lies between takes many times a matrix."""
    for tiles_MKW in tiles_EMKW:
        yield untiled(tiles_MKW[None], rows, columns, gated=gated)


TORCH = Peer(
    name="torch grouped_mm, bf16 weights",
    distribution="torch",
    module="torch",
    bind=f"{__name__}:{torch_grouped.__name__}",
)


class Product(NamedTuple):
    """One of Humming's grouped products, ready for the pairs of `inputs`."""

    layer: Any
    options: dict[str, Any]

    def __call__(self, x: Tensor, choices: int) -> Tensor:
        """Row `p // choices` of x for pair p, times its expert's matrix."""
        return self.layer(x, top_k=choices, **self.options)


def humming(inputs: Inputs, backward: bool) -> Bound:
    w13_EMKW, w2_EMKW, expert_TR = inputs["w13_EMKW"], inputs["w2_EMKW"], inputs["expert_TR"]
    width = inputs["x_TL"].shape[1]
    rows, inner = w13_EMKW.shape[1] * ROWS, w2_EMKW.shape[2] * COLUMNS
    gate_up = _product(w13_EMKW, rows, width, True, expert_TR)
    down = _product(w2_EMKW, width, inner, False, expert_TR)
    caps, choices = (inputs["beta"], inputs["linear_beta"]), expert_TR.shape[1]

    def call() -> Tensor:
        hidden_PI = situ_glu(gate_up(inputs["x_TL"], choices), *caps)
        out_TRL = down(hidden_PI, 1).view(*expert_TR.shape, width)
        return torch.einsum("trl,tr->tl", out_TRL, inputs["weight_TR"].to(out_TRL.dtype))

    return Bound(call, lambda y_TL: [y_TL])


def _product(
    tiles_EMKW: Tensor, rows: int, columns: int, gated: bool, expert_TR: Tensor
) -> Product:
    module, tune = import_module("humming.layer"), import_module("humming.tune")
    each = list(_each(tiles_EMKW, rows, columns, gated))
    packed, num_experts = Packed(*map(torch.cat, zip(*each, strict=True))), len(each)
    layer = module.HummingLayer(
        shape_n=rows,
        shape_k=columns,
        weight_config={"quant_method": "mxfp4"},
        num_experts=num_experts,
        torch_dtype=torch.bfloat16,
    ).to(packed.codes_EOI.device)
    layer.load_from_tensors({"weight": packed.codes_EOI, "weight_scale": packed.scale_EOG})
    layer.transform()
    tuning = tune.get_heuristics_config(
        layer.humming_config, shape_m=expert_TR.numel(), gemm_type="indexed"
    )
    pairs = _blocks(expert_TR, num_experts, tuning["block_shape"][0])
    compute = {"gemm_type": "indexed"}
    return Product(layer, pairs | {"compute_config": compute, "tuning_config": tuning})


def _blocks(expert_TR: Tensor, num_experts: int, block: int) -> dict[str, Tensor]:
    """Pairs by expert in whole blocks, filled up with a number that is no pair."""
    expert_P = expert_TR.flatten()
    counts_E = expert_P.bincount(minlength=num_experts)
    blocks_E = (counts_E + block - 1) // block
    total = int(blocks_E.sum()) * block
    sorted_P, pair_P = expert_P.sort(stable=True)
    shift_E = (blocks_E.cumsum(0) - blocks_E) * block - (counts_E.cumsum(0) - counts_E)
    at_P = torch.arange(len(expert_P), device=expert_P.device) + shift_E[sorted_P]
    ids = torch.full((total,), len(expert_P), dtype=torch.int32, device=expert_P.device)
    ids[at_P] = pair_P.int()
    every_E = torch.arange(num_experts, dtype=torch.int32, device=expert_P.device)
    return {
        "sorted_ids": ids,
        "expert_ids": every_E.repeat_interleave(blocks_E),
        "num_tokens_padded": torch.tensor(total, dtype=torch.int32, device=expert_P.device),
    }


HUMMING = Peer(
    name="Humming, indexed",
    distribution="humming-kernels",
    module="humming",
    bind=f"{__name__}:{humming.__name__}",
)
