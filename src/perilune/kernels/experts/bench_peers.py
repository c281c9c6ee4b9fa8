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
from perilune.kernels.common.mxfp4 import GROUP
from perilune.kernels.experts import grouped
from perilune.kernels.experts.tiles import COLUMNS, ROWS, Packed, untiled, values
from perilune.kernels.registry import Inputs, resolve

situ_glu = resolve("situ")


def torch_grouped(inputs: Inputs, backward: bool) -> Bound:
    names = "x_TL", "expert_TR", "weight_TR", "w13_E2IL", "w2_ELI", "beta", "linear_beta"
    arguments = [inputs[name] for name in names]
    return Bound(lambda: grouped.experts(*arguments), lambda y_TL: [y_TL])


class Sizes(NamedTuple):
    rows: int
    """Of gate and up together, padded."""
    width: int
    inner: int
    """Columns of the down matrix, padded."""


def sizes_of(inputs: Inputs) -> Sizes:
    w13_EMKW, w2_EMKW = inputs["w13_EMKW"], inputs["w2_EMKW"]
    width = inputs["x_TL"].shape[1]
    return Sizes(w13_EMKW.shape[1] * ROWS, width, w2_EMKW.shape[2] * COLUMNS)


def dequantised(inputs: Inputs) -> Inputs:
    """w13 [E, 2I, L] and w2 [E, L, I] in bf16, made an expert at a time."""
    rows, width, inner = sizes_of(inputs)
    w2_ELI = _bf16(inputs["w2_EMKW"], width, inner, gated=False)[..., : rows // 2]
    return {"w13_E2IL": _bf16(inputs["w13_EMKW"], rows, width, gated=True), "w2_ELI": w2_ELI}


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
    prepare=f"{__name__}:{dequantised.__name__}",
)


class Product(NamedTuple):
    """One of Humming's grouped products, ready for the pairs of `inputs`."""

    layer: Any
    options: dict[str, Any]

    def __call__(self, x: Tensor, choices: int) -> Tensor:
        """Row `p // choices` of x for pair p, times its expert's matrix."""
        return self.layer(x, top_k=choices, **self.options)


def humming(inputs: Inputs, backward: bool) -> Bound:
    expert_TR, width = inputs["expert_TR"], inputs["x_TL"].shape[1]
    gate_up = _product(inputs["gate_up"], expert_TR, inputs["num_experts"])
    down = _product(inputs["down"], expert_TR, inputs["num_experts"])
    caps, choices = (inputs["beta"], inputs["linear_beta"]), expert_TR.shape[1]

    def call() -> Tensor:
        hidden_PI = situ_glu(gate_up(inputs["x_TL"], choices), *caps)
        out_TRL = down(hidden_PI, 1).view(*expert_TR.shape, width)
        return torch.einsum("trl,tr->tl", out_TRL, inputs["weight_TR"].to(out_TRL.dtype))

    return Bound(call, lambda y_TL: [y_TL])


def humming_layers(inputs: Inputs) -> Inputs:
    rows, width, inner = sizes_of(inputs)
    return {
        "gate_up": _layer(inputs["w13_EMKW"], rows, width, gated=True),
        "down": _layer(inputs["w2_EMKW"], width, inner, gated=False),
        "num_experts": len(inputs["w13_EMKW"]),
    }


def _layer(tiles_EMKW: Tensor, rows: int, columns: int, *, gated: bool) -> Any:
    module = import_module("humming.layer")
    shape, device = (len(tiles_EMKW), rows), tiles_EMKW.device
    # Its weights would be laid out on the host first: 10 GB of them.
    with device:
        codes_EOI = torch.empty(*shape, columns // 2, dtype=torch.uint8)
        scale_EOG = torch.empty(*shape, columns // GROUP, dtype=torch.uint8)
        layer = module.HummingLayer(
            shape_n=rows,
            shape_k=columns,
            weight_config={"quant_method": "mxfp4"},
            num_experts=len(tiles_EMKW),
            torch_dtype=torch.bfloat16,
        )
    for expert, packed in enumerate(_each(tiles_EMKW, rows, columns, gated)):
        codes_EOI[expert], scale_EOG[expert] = packed.codes_EOI[0], packed.scale_EOG[0]
    layer.load_from_tensors({"weight": codes_EOI, "weight_scale": scale_EOG})
    del codes_EOI, scale_EOG  # `transform` takes as much once more
    layer.transform()
    return layer


def _product(layer: Any, expert_TR: Tensor, num_experts: int) -> Product:
    tuning = import_module("humming.tune").get_heuristics_config(
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
    prepare=f"{__name__}:{humming_layers.__name__}",
)
