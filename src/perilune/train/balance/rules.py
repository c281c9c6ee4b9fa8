"""Rules by which a router's bias follows the loads, by the name that a recipe gives.

Legend: L layers, E experts, R experts a token, B bins of a histogram.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from perilune.train.balance.quantile import quantile_bias
from perilune.train.config import BalanceConfig


class Counted(NamedTuple):
    """What all ranks and micro-batches of a step counted, under `bias_LE`."""

    bias_LE: Tensor
    load_LE: Tensor
    count_LEB: Tensor | None
    """Histograms of required biases, for a rule that asks for them."""
    num_active: int


class Rule(NamedTuple):
    next_bias: Callable[[Counted, BalanceConfig], Tensor]
    has_histogram: bool = False
    has_penalty: bool = False


def by_quantile(counted: Counted, config: BalanceConfig) -> Tensor:
    """Kimi K3's."""
    assert counted.count_LEB is not None
    return quantile_bias(counted.count_LEB, counted.bias_LE, counted.num_active)


def by_sign(counted: Counted, config: BalanceConfig) -> Tensor:
    """DeepSeek-V3's (arXiv 2408.15664): a fixed step up below the mean load, down above it."""
    load_LE = counted.load_LE.double()
    below_LE = torch.sign(load_LE.mean(-1, keepdim=True) - load_LE)
    return counted.bias_LE + config.sign_rate * below_LE.to(counted.bias_LE.dtype)


def kept(counted: Counted, config: BalanceConfig) -> Tensor:
    return counted.bias_LE


RULES = {
    "quantile": Rule(by_quantile, has_histogram=True),
    "sign": Rule(by_sign),
    "auxiliary": Rule(kept, has_penalty=True),
    "none": Rule(kept),
}
