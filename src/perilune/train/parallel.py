"""A model's parameters shared out among a team: FSDP2 for all of it, and whole experts by rank."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.tensor import DTensor, Shard

from perilune.core.errors import ConfigError
from perilune.model.model import Transformer
from perilune.model.moe import Experts, MoE
from perilune.train.exchange import GroupExchange
from perilune.train.step import DeviceBatch, batch_loss, moe_layers
from perilune.train.team import Team


class LossModule(nn.Module):
    """`batch_loss` as a module: what FSDP gathers a model's outermost parameters for."""

    def __init__(self, model: Transformer) -> None:
        super().__init__()
        self.model = model

    def forward(self, batch: DeviceBatch) -> Tensor:
        return batch_loss(self.model, batch)


def share_out(model: Transformer, team: Team) -> LossModule:
    """Leaves every rank its part of the parameters, as `DTensor`s, and returns the loss to train.

    Every rank gives the same weights. Gradients are sums over the ranks. A layer's parameters are
    gathered while it runs, in fp32, which the ops cast themselves.

    Raises:
        ConfigError: experts cannot be shared out equally.
    """
    assert team.all is not None, "a team of one has nothing to share out"
    if team.expert_ranks > 1:
        for moe in moe_layers(model):
            _share_out_experts(moe, team)
    for layer in model.model.layers:
        fully_shard(layer, mesh=team.all)
    root = LossModule(model)
    fully_shard(root, mesh=team.all)
    for module in root.modules():
        if isinstance(module, FSDPModule):
            # Losses are weighted by their tokens already; gloo does not know other reductions.
            module.set_gradient_divide_factor(1.0)
            module.set_force_sum_reduction_for_comms(True)
    return root


def _share_out_experts(moe: MoE, team: Team) -> None:
    assert team.experts is not None
    num_experts, num_cuts = moe.gate.moe.num_experts, team.experts.size(0)
    mesh = team.experts["experts"]
    experts = moe.experts
    assert isinstance(experts, Experts)
    if num_experts % mesh.size():
        raise ConfigError(f"expert_ranks is {mesh.size()}, but there are {num_experts} experts")
    for name, weight in list(experts.named_parameters()):
        if weight.shape[1] % num_cuts:
            raise ConfigError(f"{num_cuts} ranks cannot cut experts of {weight.shape[1]} rows")
        own = weight.data.chunk(mesh.size())[mesh.get_local_rank()].clone()
        shared_out = DTensor.from_local(own, mesh, [Shard(0)], run_check=False)
        setattr(experts, name, nn.Parameter(shared_out))
    fully_shard(experts, mesh=team.experts["shard"], shard_placement_fn=lambda _: Shard(1))
    moe.exchange = GroupExchange(mesh.get_group(), num_experts)


def whole(x: Tensor) -> Tensor:
    """All of x on this rank, gathered where it is shared out."""
    return x.full_tensor() if isinstance(x, DTensor) else x


@torch.no_grad()
def whole_model(model: Transformer, team: Team) -> Transformer | None:
    """On the first rank a copy of the model with all of its weights, on the CPU; None elsewhere."""
    copy = Transformer(model.config) if team.rank == 0 else None
    targets = {} if copy is None else copy.state_dict()
    for name, value in model.state_dict().items():
        gathered = whole(value)
        if copy is not None:
            targets[name].copy_(gathered)
    return copy
