"""The product of fp32 numbers by torch, with a weight that is held in fp32 already."""

from __future__ import annotations

from torch.nn import functional

from perilune.kernels.bench.cases import Bound, Peer
from perilune.kernels.registry import Inputs

TORCH_FP32 = Peer(
    name="torch fp32", distribution="torch", module="torch", bind=f"{__name__}:torch_fp32"
)


def torch_fp32(inputs: Inputs, backward: bool) -> Bound:
    assert not backward
    x_TI, weight_OI = inputs["x_TI"], inputs["weight_OI"].float()
    return Bound(lambda: functional.linear(x_TI.float(), weight_OI), lambda y_TO: [y_TO])
