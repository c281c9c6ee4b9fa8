"""One training step: forward, backward, clip, update, clip logits, balance.

Legend: B rows, L tokens of a row.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
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
from perilune.train.config import TrainConfig
from perilune.train.data import IGNORED, PADDING, Batch
from perilune.train.loss import head_loss
from perilune.train.qk_clip import QKClip
from perilune.train.schedule import lr_at
from perilune.train.team import ALONE, Team
from perilune.train.whole_blocks import own_part


class DeviceBatch(NamedTuple):
    """A `data.Batch` as int64 tensors where the model is."""

    inputs_BL: Tensor
    targets_BL: Tensor
    segments_BL: Tensor

    @staticmethod
    def of(batch: Batch, device: str, team: Team = ALONE) -> DeviceBatch:
        """This rank's rows of `batch`."""
        rows = team.rows(len(batch.inputs_BL))
        tensors = (torch.as_tensor(array[rows]).long() for array in batch)
        return DeviceBatch(*(tensor.to(device, non_blocking=True) for tensor in tensors))

    def parts(self, num: int) -> Iterator[DeviceBatch]:
        """Its rows in `num` equal parts, one after another."""
        for part in zip(*(x.chunk(num) for x in self), strict=True):
            yield DeviceBatch(*part)


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


def total_norm(grads: Sequence[Tensor], team: Team = ALONE) -> Tensor:
    """The norm of what all ranks hold, each a part of its own."""
    norm = nn.utils.get_total_norm(grads)
    return norm if team.size == 1 else team.sum(norm.square()).sqrt()


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
    """Owns the optimisers; `loss_fn` is `batch_loss` or another form of it.

    A step's batch may come in parts, one after another and each on another rank: the loss and the
    gradients are means over all targets, the balancers count all tokens.
    """

    def __init__(
        self,
        model: Transformer,
        optimizers: list[torch.optim.Optimizer],
        config: TrainConfig,
        loss_fn: LossFunction = batch_loss,
        team: Team = ALONE,
    ) -> None:
        self.model, self.optimizers, self.config = model, optimizers, config
        self.loss_fn, self.team = loss_fn, team
        layers = [module for module in model.modules() if isinstance(module, MLA)]
        clip = config.optim.qk_clip
        self.qk_clip = QKClip(layers, clip, team.max) if clip else None
        self.balancing = Balancing(moe_layers(model), config.balance, team.sum)

    def __call__(self, step: int, batch: DeviceBatch) -> StepResult:
        """Trains on `batch` as step number `step`, from 0.

        Raises:
            NonFiniteError: before anything was updated.
        """
        loss = self._forward_backward(batch)
        grad_norm = self._clip(step, loss)
        lr = lr_at(step, self.config.steps, self.config.optim)
        for optimizer in self.optimizers:
            for group in optimizer.param_groups:
                group["lr"] = lr
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
        max_logit = None if self.qk_clip is None else self.qk_clip.clip()
        return StepResult(loss, grad_norm, lr, self.balancing.update(), max_logit)

    def _forward_backward(self, batch: DeviceBatch) -> Tensor:
        """The mean loss of all ranks' batches; its gradients are where parameters have them."""
        num_targets = self.team.sum((batch.targets_BL != IGNORED).sum().float())
        losses = []
        for part in batch.parts(self.config.micro_batches):
            share = (part.targets_BL != IGNORED).sum() / num_targets
            with self.balancing.counting((part.segments_BL != PADDING).reshape(-1), share):
                loss = self.loss_fn(self.model, part) * share
            loss.backward()
            losses.append(loss.detach())
        return self.team.sum(torch.stack(losses).sum())

    def _clip(self, step: int, loss: Tensor) -> Tensor:
        # An own part shares its memory with the gradient that it is of.
        grads = [own_part(p.grad) for p in self.model.parameters() if p.grad is not None]
        norm = total_norm(grads, self.team)
        # Clipping would spread the NaN of one gradient over all of them.
        if not torch.isfinite(norm + loss):
            raise NonFiniteError(f"step {step}: {self._first_non_finite(loss)}")
        torch._foreach_mul_(grads, (self.config.optim.max_grad_norm / (norm + 1e-6)).clamp(max=1))
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
