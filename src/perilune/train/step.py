"""One training step: forward, backward, clip, balance, update."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from perilune.core.errors import PeriluneError
from perilune.kernels.common.packing import Packing
from perilune.model.model import Transformer
from perilune.model.moe import MoE
from perilune.train.balance import QuantileBalancer
from perilune.train.config import OptimConfig
from perilune.train.loss import cross_entropy
from perilune.train.optim import lr_at


class Batch(NamedTuple):
    """Rows of packed documents. Legend: B rows, L tokens of a row."""

    inputs_BL: Tensor
    targets_BL: Tensor
    segment_BL: Tensor


class StepResult(NamedTuple):
    """Scalars that stay on the device until somebody reads them."""

    loss: Tensor
    grad_norm: Tensor
    lr: float
    max_violation: Tensor
    """Largest MaxVio over the layers."""


class NonFiniteError(PeriluneError):
    """Loss or gradient is not finite; the message names the first parameter concerned."""


def batch_loss(model: Transformer, batch: Batch) -> Tensor:
    """Mean cross entropy of a batch, in nats a token."""
    packing = Packing.rows(batch.segment_BL)
    logits_TV = model(batch.inputs_BL.reshape(-1), packing)
    return cross_entropy(logits_TV, batch.targets_BL.reshape(-1))


def moe_layers(model: Transformer) -> list[MoE]:
    return [module for module in model.modules() if isinstance(module, MoE)]


def attach_balancers(model: Transformer) -> None:
    """Gives every MoE layer its quantile balancer."""
    moe = model.config.moe
    if moe is None:
        return
    for layer in moe_layers(model):
        device = layer.gate.weight.device
        layer.observe = QuantileBalancer(moe.num_experts, moe.num_experts_per_token).to(device)


class Stepper:
    """Owns the optimisers; `loss_fn` may be a compiled `batch_loss`."""

    def __init__(
        self,
        model: Transformer,
        optimizers: list[torch.optim.Optimizer],
        config: OptimConfig,
        steps: int,
        loss_fn=batch_loss,
    ) -> None:
        self.model, self.optimizers, self.config = model, optimizers, config
        self.steps, self.loss_fn = steps, loss_fn

    def __call__(self, step: int, batch: Batch) -> StepResult:
        loss = self.loss_fn(self.model, batch)
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(self.model.parameters(), self.config.max_grad_norm)
        if not torch.isfinite(norm + loss.detach()):
            raise NonFiniteError(f"step {step}: {self._first_non_finite()}")
        lr = lr_at(step, self.steps, self.config)
        for optimizer in self.optimizers:
            for group in optimizer.param_groups:
                group["lr"] = lr
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
        return StepResult(loss.detach(), norm, lr, self._balance(loss))

    def _balance(self, loss: Tensor) -> Tensor:
        worst = [loss.new_zeros((), dtype=torch.float64)]
        for layer in moe_layers(self.model):
            if isinstance(layer.observe, QuantileBalancer):
                worst.append(layer.observe.update(layer.gate.e_score_correction_bias))
        return torch.stack(worst).max()

    def _first_non_finite(self) -> str:
        for name, p in self.model.named_parameters():
            if p.grad is not None and not torch.isfinite(p.grad).all():
                return f"the gradient of {name} is not finite"
        return "the loss is not finite"
