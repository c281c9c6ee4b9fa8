"""One training step: forward, backward, clip, update, clip logits, balance.

Legend: B rows, L tokens of a row.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor, nn

from perilune.core.errors import PeriluneError
from perilune.kernels.common.packing import Packing
from perilune.model.mla import MLA
from perilune.model.model import Transformer
from perilune.model.moe import MoE
from perilune.train.balance.balancing import Balancing
from perilune.train.balance.loads import LoadStats
from perilune.train.config import BalanceConfig, OptimConfig
from perilune.train.data import PADDING, Batch
from perilune.train.loss import head_loss
from perilune.train.qk_clip import QKClip
from perilune.train.schedule import lr_at


class DeviceBatch(NamedTuple):
    """A `data.Batch` as int64 tensors where the model is."""

    inputs_BL: Tensor
    targets_BL: Tensor
    segments_BL: Tensor

    @staticmethod
    def of(batch: Batch, device: str) -> DeviceBatch:
        tensors = (torch.as_tensor(array).long() for array in batch)
        return DeviceBatch(*(tensor.to(device, non_blocking=True) for tensor in tensors))


LossFunction = Callable[[Transformer, DeviceBatch], Tensor]


class StepResult(NamedTuple):
    """Scalars that stay on the device until somebody reads them."""

    loss: Tensor
    grad_norm: Tensor
    lr: float
    loads: LoadStats
    max_logit: Tensor | None = None
    """Of MLA's heads, before QK-Clip; None where nobody watches."""

    def scalars(self) -> dict[str, Tensor | float]:
        """Every value under the name that it is logged by."""
        values = self._asdict()
        loads = values.pop("loads")
        return {k: v for k, v in {**values, **loads._asdict()}.items() if v is not None}


class NonFiniteError(PeriluneError):
    """A weight, the loss or a gradient is not finite; the message names the first one."""


def batch_loss(
    model: Transformer, batch: DeviceBatch, head: Callable[..., Tensor] = head_loss
) -> Tensor:
    """Mean cross entropy of a batch, in nats a token."""
    hidden_TD = model.model(batch.inputs_BL.reshape(-1), Packing.rows(batch.segments_BL), None)
    return head(model, hidden_TD, batch.targets_BL.reshape(-1))


def moe_layers(model: Transformer) -> list[MoE]:
    """The MoE layers from the input upwards."""
    return [module for module in model.modules() if isinstance(module, MoE)]


class Stepper:
    """Owns the optimisers; `loss_fn` is `batch_loss` or a compiled form of it."""

    def __init__(
        self,
        model: Transformer,
        optimizers: list[torch.optim.Optimizer],
        config: OptimConfig,
        steps: int,
        loss_fn: LossFunction = batch_loss,
        balance: BalanceConfig | None = None,
    ) -> None:
        self.model, self.optimizers, self.config = model, optimizers, config
        self.steps, self.loss_fn = steps, loss_fn
        layers = [module for module in model.modules() if isinstance(module, MLA)]
        self.qk_clip = QKClip(layers, config.qk_clip) if config.qk_clip else None
        self.balancing = Balancing(moe_layers(model), balance or BalanceConfig())

    def __call__(self, step: int, batch: DeviceBatch) -> StepResult:
        """Trains on `batch` as step number `step`, from 0.

        Raises:
            NonFiniteError: before anything was updated.
        """
        with self.balancing.counting((batch.segments_BL != PADDING).reshape(-1)):
            loss = self.loss_fn(self.model, batch)
        loss.backward()
        grad_norm = self._clip(step, loss.detach())
        lr = lr_at(step, self.steps, self.config)
        for optimizer in self.optimizers:
            for group in optimizer.param_groups:
                group["lr"] = lr
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
        max_logit = None if self.qk_clip is None else self.qk_clip.clip()
        return StepResult(loss.detach(), grad_norm, lr, self.balancing.update(), max_logit)

    def _clip(self, step: int, loss: Tensor) -> Tensor:
        parameters = [p for p in self.model.parameters() if p.grad is not None]
        norm = nn.utils.get_total_norm([p.grad for p in parameters if p.grad is not None])
        # Clipping would spread the NaN of one gradient over all of them.
        if not torch.isfinite(norm + loss):
            raise NonFiniteError(f"step {step}: {self._first_non_finite(loss)}")
        nn.utils.clip_grads_with_norm_(parameters, self.config.max_grad_norm, norm)
        return norm

    def _first_non_finite(self, loss: Tensor) -> str:
        for name, p in self.model.named_parameters():
            if not torch.isfinite(p).all():
                return f"the weight {name} is not finite"
        if not torch.isfinite(loss):
            return f"the loss is {float(loss)}, although every weight is finite"
        for name, p in self.model.named_parameters():
            if p.grad is not None and not torch.isfinite(p.grad).all():
                return f"the gradient of {name} is not finite"
        return "the norm of the gradients overflows"
