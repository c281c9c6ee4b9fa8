"""A Kimi Delta Attention layer.

Legend: T packed tokens, N sequences, M chunks of P tokens together, D model width, H heads, K key =
value width, C channels of the three convolutions, W conv width.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor, nn

from perilune.kernels.common.packing import Cuts, Packing
from perilune.kernels.kda.reference import KDAOut
from perilune.kernels.registry import resolve
from perilune.model.config import ModelConfig
from perilune.model.linear import Fused, Linear
from perilune.model.norm import RMSNorm
from perilune.model.pools import Pooled, StatePool
from perilune.model.ranks import ALONE, Ranks
from perilune.model.step import DecodeRange, PrefillRange

causal_conv = resolve("causal_conv")
kda_chunk = resolve("kda_chunk")
kda_step = resolve("kda_step")
gated_rms_norm = resolve("gated_rms_norm")


class KDAInputs(NamedTuple):
    """What a layer's projections give, a row a token."""

    qkv_TC: Tensor
    z_TC: Tensor
    b_TH: Tensor
    gate_TC: Tensor

    def part(self, tokens: slice) -> KDAInputs:
        return KDAInputs(*(x[tokens] for x in self))


class Conv(nn.Module):
    """Weight of one depthwise convolution, [C, 1, W] as in the checkpoint."""

    def __init__(self, channels: int, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(channels, 1, width))


class KDA(nn.Module):
    def __init__(self, config: ModelConfig, ranks: Ranks = ALONE) -> None:
        """`config` is this rank's: its heads are those of this layer."""
        super().__init__()
        kda, d = config.kda, config.hidden_size
        self.ranks = ranks
        self.num_heads, self.head_dim = kda.num_heads, kda.head_dim
        self.lower_bound = kda.gate_lower_bound
        inner = kda.num_heads * kda.head_dim
        self.q_proj, self.k_proj, self.v_proj = (Linear(d, inner) for _ in range(3))
        self.q_conv1d, self.k_conv1d, self.v_conv1d = (
            Conv(inner, kda.conv_width) for _ in range(3)
        )
        self.f_a_proj = Linear(d, kda.head_dim)
        self.f_b_proj = Linear(kda.head_dim, inner)
        self.b_proj = Linear(d, kda.num_heads)
        self.A_log = nn.Parameter(torch.empty(kda.num_heads))
        self.dt_bias = nn.Parameter(torch.empty(inner))
        if kda.full_rank_gate:
            self.g_proj = Linear(d, inner)
            gate_in = self.g_proj
        else:
            self.g_a_proj = Linear(d, kda.head_dim)
            self.g_b_proj = Linear(kda.head_dim, inner)
            gate_in = self.g_a_proj
        self.o_norm = RMSNorm(kda.head_dim, config.rms_norm_eps)
        self.o_proj = Linear(inner, d)
        self.inputs = Fused(
            [self.q_proj, self.k_proj, self.v_proj, gate_in, self.f_a_proj, self.b_proj]
        )
        self.conv_CW: Tensor | None = None

    def freeze(self) -> None:
        """Prepares for inference: fused projections, one convolution weight."""
        self.inputs.freeze()
        self.conv_CW = self._conv_weight().contiguous()

    def _conv_weight(self) -> Tensor:
        if self.conv_CW is not None:
            return self.conv_CW
        convs = (self.q_conv1d, self.k_conv1d, self.v_conv1d)
        return torch.cat([conv.weight[:, 0] for conv in convs])

    def forward(self, x_TD: Tensor, packing: Packing | None, at: Pooled | None) -> Tensor:
        inner = self.num_heads * self.head_dim
        sizes = [3 * inner, *self.inputs.sizes[3:]]
        qkv_TC, gate_in, f_TK, b_TH = self.inputs(x_TD).split(sizes, dim=-1)
        z_TC = self.f_b_proj(f_TK)
        gate_TC = gate_in if hasattr(self, "g_proj") else self.g_b_proj(gate_in)
        x = KDAInputs(qkv_TC, z_TC, b_TH, gate_TC)
        if at is not None:
            o_THV = self._pooled(x, at)
        else:
            assert packing is not None
            o_THV = self._alone(x, packing)
        return self.ranks.sum(self.o_proj(o_THV.reshape(-1, inner).to(x_TD.dtype)))

    def _pooled(self, x: KDAInputs, at: Pooled) -> Tensor:
        pool, step = at.pool, at.step
        assert isinstance(pool, StatePool), type(pool)
        outputs, begin = [], step.num_decoded
        if step.decode is not None:
            decoded = x.part(slice(begin)) if step.prefill else x
            if at.drafted is not None:
                at.drafted.append(decoded)
            outputs.append(self.decode(decoded, pool, step.decode))
        for chunks in step.prefill:
            end = begin + chunks.packing.num_tokens
            outputs.append(self._chunks(x.part(slice(begin, end)), pool, chunks))
            begin = end
        return outputs[0] if len(outputs) == 1 else torch.cat(outputs)

    def decode(self, x: KDAInputs, pool: StatePool, decoding: DecodeRange) -> Tensor:
        """Outputs [T, H, V] of the sequences that decode; their states move on in the pool."""
        heads = (-1, self.num_heads, self.head_dim)
        return kda_step(
            x.qkv_TC,
            x.z_TC.view(heads),
            x.b_TH,
            x.gate_TC.view(heads),
            self._conv_weight(),
            self.A_log,
            self.dt_bias.view(self.num_heads, -1),
            self.o_norm.weight,
            pool.window_SWC,
            pool.state_SHKV,
            decoding.slot_N,
            self.lower_bound,
            self.o_norm.eps,
            decoding.keep_N,
        )

    def _alone(self, x: KDAInputs, packing: Packing) -> Tensor:
        """Without a memory of what was before, nor of what is left behind."""
        conv = causal_conv(x.qkv_TC, self._conv_weight(), packing, None)
        return self._gated(self._chunk(conv.y_TC, x, packing).o_THV, x)

    def _chunks(self, x: KDAInputs, pool: StatePool, chunks: PrefillRange) -> Tensor:
        state_MHKV, window_MWC = pool.before(chunks)
        conv = causal_conv(x.qkv_TC, self._conv_weight(), chunks.packing, window_MWC)
        out = self._chunk(conv.y_TC, x, chunks.packing, state_MHKV, chunks.cuts)
        assert out.state_NHKV is not None
        pool.write(chunks.slot_M, out.state_NHKV, conv.window_NWC)
        if out.cut_EHKV is not None:
            window_EWC = pool.windows_at_cuts(x.qkv_TC, window_MWC, chunks)
            pool.write(chunks.cut_slot_E, out.cut_EHKV, window_EWC)
        return self._gated(out.o_THV, x)

    def _chunk(
        self,
        y_TC: Tensor,
        x: KDAInputs,
        packing: Packing,
        state_NHKV: Tensor | None = None,
        cuts: Cuts | None = None,
    ) -> KDAOut:
        heads = (-1, self.num_heads, self.head_dim)
        return kda_chunk(
            *(part.reshape(heads) for part in (*y_TC.chunk(3, dim=-1), x.z_TC)),
            x.b_TH,
            self.A_log,
            self.dt_bias.view(self.num_heads, -1),
            packing,
            self.lower_bound,
            state_NHKV,
            cuts,
        )

    def _gated(self, o_THV: Tensor, x: KDAInputs) -> Tensor:
        gate_THV = x.gate_TC.view(o_THV.shape)
        return gated_rms_norm(o_THV, gate_THV, self.o_norm.weight, self.o_norm.eps)
