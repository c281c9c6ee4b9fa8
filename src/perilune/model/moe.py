"""Feed-forward layers: the dense MLP, Stable LatentMoE (K3) and the plain MoE (Kimi Linear).

Legend: T packed tokens, D model width, L latent width, E experts, R experts a token,
I intermediate width.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

import torch
from torch import Tensor, nn

from perilune.kernels.registry import resolve
from perilune.kernels.router.reference import Routes
from perilune.kernels.router.tally import Tally
from perilune.model.config import ModelConfig, MoEConfig
from perilune.model.linear import Fused, Held, Linear
from perilune.model.norm import RMSNorm
from perilune.model.packed_experts import PackedExperts
from perilune.model.ranks import ALONE, Ranks

scores = resolve("scores")
situ_glu = resolve("situ")
route = resolve("router")
experts = resolve("experts")


Caps = tuple[float | None, float | None]


def caps(config: ModelConfig) -> Caps:
    """The caps of the GLU: SiTU (K3), or none at all, which is SwiGLU (Kimi Linear)."""
    situ = config.activation == "situ"
    return (config.situ_beta, config.situ_linear_beta) if situ else (None, None)


class MLP(nn.Module):
    """Dense layer and shared experts. The output is this rank's part of a sum."""

    def __init__(self, config: ModelConfig, intermediate: int) -> None:
        super().__init__()
        self.gate_proj = Linear(config.hidden_size, intermediate)
        self.up_proj = Linear(config.hidden_size, intermediate)
        self.down_proj = Linear(intermediate, config.hidden_size)
        self.gate_up = Fused([self.gate_proj, self.up_proj])
        self.caps = caps(config)

    def freeze(self) -> None:
        self.gate_up.freeze()

    def forward(self, x_TD: Tensor) -> Tensor:
        return self.down_proj(situ_glu(self.gate_up(x_TD), *self.caps))


class Router(nn.Module):
    """fp32 scores of the full hidden vector; the bias only selects."""

    def __init__(self, config: ModelConfig, moe: MoEConfig) -> None:
        super().__init__()
        self.moe = moe
        self.weight = nn.Parameter(torch.empty(moe.num_experts, config.hidden_size))
        self.e_score_correction_bias: Tensor
        self.register_buffer("e_score_correction_bias", torch.zeros(moe.num_experts))
        self.held: Held | None = None
        self.balancer: nn.Module | None = None
        """Called with the logits [T, E] and the choice to make on them, whose routes it returns.
        It may hand a `Tally` to the choice, which adds to it."""

    def freeze(self) -> None:
        self.held = Held(self.weight.data)

    def forward(self, x_TD: Tensor) -> Routes:
        held = self.held
        weight = self.weight if held is None else held.for_tokens(x_TD.shape[0])
        logits_TE = scores(x_TD, weight)
        if self.balancer is None:
            return self._choose(logits_TE)
        return self.balancer(logits_TE, self._choose)

    def _choose(self, logits_TE: Tensor, tally: Tally | None = None) -> Routes:
        return route(
            logits_TE,
            self.e_score_correction_bias,
            self.moe.num_experts_per_token,
            self.moe.renormalize,
            self.moe.routed_scaling_factor,
            *(tally or ()),
        )


class Experts(nn.Module):
    """Stacked weights of the routed experts; `w13` holds the gate rows, then the up rows."""

    def __init__(self, moe: MoEConfig, width: int, num_experts: int) -> None:
        super().__init__()
        self.w13 = nn.Parameter(torch.empty(num_experts, 2 * moe.intermediate_size, width))
        self.w2 = nn.Parameter(torch.empty(num_experts, width, moe.intermediate_size))
        self.held: tuple[Held, Held] | None = None

    def freeze(self) -> None:
        self.held = Held(self.w13.data), Held(self.w2.data)

    def weights(self, num_tokens: int) -> tuple[Tensor, Tensor]:
        if self.held is None:
            return self.w13, self.w2
        w13, w2 = (held.for_tokens(num_tokens) for held in self.held)
        return w13, w2

    def forward(
        self, z_TL: Tensor, routes: Routes, caps: Caps, quantize: Callable[[Tensor], Tensor] | None
    ) -> Tensor:
        w13, w2 = self.weights(z_TL.shape[0])
        if quantize is not None:
            w13, w2 = quantize(w13), quantize(w2)
        return experts(z_TL, routes.expert_TR, routes.weight_TR, w13, w2, *caps)


class Exchange(Protocol):
    """Tokens of several ranks, each of which has others, meet the experts that are shared out."""

    def gather(self, z_TL: Tensor, routes: Routes) -> tuple[Tensor, Routes]:
        """The tokens of all ranks, with the experts as this rank counts its own; -1: elsewhere."""
        ...

    def scatter(self, y_TL: Tensor) -> Tensor:
        """This rank's tokens of the sum over all ranks."""
        ...


class MoE(nn.Module):
    """Every rank routes all tokens alike, sends them through its own experts and its part of the
    shared ones, and one sum joins both. What leads into the latent and out of it all ranks have."""

    def __init__(self, config: ModelConfig, moe: MoEConfig, ranks: Ranks = ALONE) -> None:
        super().__init__()
        d, latent = config.hidden_size, moe.latent_size
        self.ranks, self.own = ranks, ranks.part(moe.num_experts)
        self.own_id_E: Tensor | None = None
        self.gate = Router(config, moe)
        self.experts: Experts | PackedExperts = Experts(moe, latent or d, len(self.own))
        if latent is not None:
            self.routed_expert_down_proj = Linear(d, latent)
            self.routed_expert_up_proj = Linear(latent, d)
            if moe.latent_norm:
                self.routed_expert_norm = RMSNorm(latent, config.rms_norm_eps)
        if moe.num_shared_experts:
            width = moe.num_shared_experts * moe.intermediate_size
            self.shared_experts = MLP(config, len(ranks.part(width)))
        self.latent_size, self.latent_norm = latent, moe.latent_norm
        self.has_shared = moe.num_shared_experts > 0
        self.caps = caps(config)
        self.quantize: Callable[[Tensor], Tensor] | None = None
        """Applied to the expert weights in every forward (quantisation-aware training)."""
        self.exchange: Exchange | None = None
        """Set by the trainer, whose ranks have tokens of their own."""

    def freeze(self) -> None:
        self.own_id_E = self._own_ids(self.gate.weight.device)

    def forward(self, x_TD: Tensor) -> Tensor:
        routes = self._to_own(self.gate(x_TD))
        z_TL = x_TD if self.latent_size is None else self.routed_expert_down_proj(x_TD)
        parts = [self._routed(z_TL, routes)]
        if self.has_shared:
            parts.append(self.shared_experts(x_TD))
        if self.latent_size is None:
            return self.ranks.sum(sum(parts[1:], parts[0]))
        y_TL, *shared_TD = self.ranks.sums(*parts)
        if self.latent_norm:
            y_TL = self.routed_expert_norm(y_TL)
        return sum(shared_TD, self.routed_expert_up_proj(y_TL))

    def _to_own(self, routes: Routes) -> Routes:
        """With the experts as this rank counts them; -1 is on another."""
        if self.ranks.size == 1:
            return routes
        own_id_E = self.own_id_E
        if own_id_E is None:
            own_id_E = self._own_ids(routes.expert_TR.device)
        return routes._replace(expert_TR=own_id_E[routes.expert_TR])

    def _own_ids(self, device: torch.device) -> Tensor:
        own_id_E = torch.full((self.gate.moe.num_experts,), -1, device=device)
        own_id_E[self.own.start : self.own.stop] = torch.arange(len(self.own), device=device)
        return own_id_E

    def _routed(self, z_TL: Tensor, routes: Routes) -> Tensor:
        if isinstance(self.experts, PackedExperts):
            assert self.quantize is None, "packed experts are quantised already"
            return self.experts(z_TL, routes, self.caps)
        if self.exchange is None:
            return self.experts(z_TL, routes, self.caps, self.quantize)
        z_TL, routes = self.exchange.gather(z_TL, routes)
        return self.exchange.scatter(self.experts(z_TL, routes, self.caps, self.quantize))
