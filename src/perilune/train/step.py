"""One training step: forward, backward, clip, update, clip logits, balance.

Legend: B rows, L tokens of a row, P parameters.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from perilune.core.errors import PeriluneError
from perilune.kernels.common.packing import Packing
from perilune.model.mla import MLA
from perilune.model.model import Transformer
from perilune.model.moe import MoE
from perilune.train.balance.balancing import Balancing
from perilune.train.balance.loads import LoadStats
from perilune.train.config import TrainConfig
from perilune.train.data import IGNORED, PADDING, Batch
from perilune.train.diagnosis import first_non_finite
from perilune.train.loss import head_loss
from perilune.train.qk_clip import QKClip
from perilune.train.schedule import lr_at
from perilune.train.spikes import MOST, LossSpikeError, SpikeGuard, TypicalNorms
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
    spike: str | None = None
    """Why the step was left out: the gradient that grew most. None: it was taken."""

    def scalars(self) -> dict[str, Tensor | float]:
        """Every value under the name that it is logged by."""
        values = self._asdict()
        loads = values.pop("loads")
        del values["spike"]
        return {k: v for k, v in {**values, **loads._asdict()}.items() if v is not None}


class Norms(NamedTuple):
    each_P: Tensor
    """Of what this rank has of each gradient."""
    total: Tensor
    """Of all gradients of all ranks."""


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
        self.optim, self.loss_fn, self.team = config.optim, loss_fn, team
        self.guard, self.typical = SpikeGuard(config.spike_sigmas), TypicalNorms()
        layers = [module for module in model.modules() if isinstance(module, MLA)]
        clip = self.optim.qk_clip
        self.qk_clip = QKClip(layers, clip, team.max) if clip else None
        self.balancing = Balancing(moe_layers(model), config.balance, team.sum)

    def __call__(self, step: int, batch: DeviceBatch) -> StepResult:
        """Trains on `batch` as step number `step`, from 0.

        Raises:
            NonFiniteError: before anything was updated.
            LossSpikeError: the loss jumped up and stays there.
        """
        loss = self._forward_backward(batch)
        norms = self._clip(step, loss, batch)
        lr = lr_at(step, self.config.steps, self.optim)
        # Whether the loss is finite was asked for already: the device has come this far.
        is_spike = self.guard.sigmas > 0 and self.guard.is_spike(float(loss))
        spike = self._spike(step, loss, norms.each_P) if is_spike else None
        for optimizer in self.optimizers:
            for group in optimizer.param_groups:
                group["lr"] = lr
            if not is_spike:
                optimizer.step()
            optimizer.zero_grad(set_to_none=True)
        if not is_spike:
            self.typical.see(norms.each_P)
        max_logit = None if self.qk_clip is None else self.qk_clip.clip()
        return StepResult(loss, norms.total, lr, self.balancing.update(), max_logit, spike)

    def _spike(self, step: int, loss: Tensor, norms_P: Tensor) -> str:
        """What to say of a step that is left out; raises if too many were."""
        grown = self.typical.grown_most(self.model, norms_P, self.team)
        if self.guard.num_in_a_row > MOST:
            raise LossSpikeError(
                f"step {step}: the loss is {float(loss):.4g}, and has been above "
                f"{self.guard.bound():.4g} for {MOST} steps; what grew most is the {grown}"
            )
        return grown

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

    def _clip(self, step: int, loss: Tensor, batch: DeviceBatch) -> Norms:
        """Scales the gradients down; their norms before that."""
        # An own part shares its memory with the gradient that it is of.
        grads = [own_part(p.grad) for p in self.model.parameters() if p.grad is not None]
        norms_P = torch.stack(torch._foreach_norm(grads))
        norm = self._total(norms_P)
        # Clipping would spread the NaN of one gradient over all of them.
        if not torch.isfinite(norm + loss):
            where = first_non_finite(self.model, loss, lambda: self._forward(batch), self.team)
            raise NonFiniteError(f"step {step}: {where}")
        torch._foreach_mul_(grads, (self.optim.max_grad_norm / (norm + 1e-6)).clamp(max=1))
        return Norms(norms_P, norm)

    def _total(self, norms_P: Tensor) -> Tensor:
        """Of all ranks, each of which has its own part of every gradient."""
        norm = torch.linalg.vector_norm(norms_P)
        return norm if self.team.size == 1 else self.team.sum(norm.square()).sqrt()

    def _forward(self, batch: DeviceBatch) -> None:
        """Once more, layer by layer: a compiled loss has no layers."""
        loss_fn = batch_loss if self.team.size == 1 else self.loss_fn
        for part in batch.parts(self.config.micro_batches):
            loss_fn(self.model, part)
