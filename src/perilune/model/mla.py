"""Gated multi-head latent attention without positions.

Legend: T packed tokens, S cached tokens, D model width, H heads, K query width = N a head's own
(nope) + R shared key channels, V value width, C latent width.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

from perilune.kernels.common.packing import Packing
from perilune.kernels.mla.absorb import queries
from perilune.kernels.registry import resolve
from perilune.model.config import ModelConfig
from perilune.model.linear import Fused, Linear, linear
from perilune.model.norm import LATENT_EPS, RMSNorm
from perilune.model.pools import LatentPool, Pooled
from perilune.model.ranks import ALONE, Ranks
from perilune.model.step import DecodeRange, PrefillRange

mla_prefill = resolve("mla_prefill")
mla_decode = resolve("mla_decode")
sigmoid_gate = resolve("sigmoid_gate")

EXPANDED = 1 << 29
"""Numbers of keys and values that a chunk with many rows in front expands at once, in groups of
heads: those of all 96 heads and a million rows would be 50 GB in bf16. So a chunk of 8,192 tokens
takes 4.1 GB beside weights and pools, and as long as with twice the room (H200)."""


LogitWatch = Callable[[Tensor, Tensor, Tensor, Packing, float], None]
"""What sees queries and keys (a head's own, and shared ones) in training, before attention."""


class MLA(nn.Module):
    def __init__(self, config: ModelConfig, ranks: Ranks = ALONE) -> None:
        """`config` is this rank's: its heads are those of this layer. Latents are of all heads."""
        super().__init__()
        mla, d = config.mla, config.hidden_size
        self.ranks = ranks
        self.mla = mla
        self.scale = mla.qk_head_dim**-0.5
        heads, q_width = mla.num_heads, mla.num_heads * mla.qk_head_dim
        if mla.q_lora_rank is None:
            self.q_proj = Linear(d, q_width)
            q_in = self.q_proj
        else:
            self.q_a_proj = Linear(d, mla.q_lora_rank)
            self.q_a_layernorm = RMSNorm(mla.q_lora_rank, LATENT_EPS)
            self.q_b_proj = Linear(mla.q_lora_rank, q_width)
            q_in = self.q_a_proj
        self.kv_a_proj_with_mqa = Linear(d, mla.cache_width)
        self.kv_a_layernorm = RMSNorm(mla.kv_lora_rank, LATENT_EPS)
        self.kv_b_proj = Linear(mla.kv_lora_rank, heads * (mla.qk_nope_head_dim + mla.v_head_dim))
        parts = [q_in, self.kv_a_proj_with_mqa]
        if mla.output_gate:
            self.g_proj = Linear(d, heads * mla.v_head_dim)
            parts.append(self.g_proj)
        self.o_proj = Linear(heads * mla.v_head_dim, d)
        self.inputs = Fused(parts)
        self.watch: LogitWatch | None = None

    def freeze(self) -> None:
        self.inputs.freeze()

    def forward(self, x_TD: Tensor, packing: Packing | None, at: Pooled | None) -> Tensor:
        q_in, kv_TC, *gate = self.inputs.split(x_TD)
        if self.mla.q_lora_rank is not None:
            q_in = self.q_b_proj(self.q_a_layernorm(q_in))
        q_THK = q_in.reshape(-1, self.mla.num_heads, self.mla.qk_head_dim)
        c_TC, shared_TR = kv_TC.split([self.mla.kv_lora_rank, self.mla.qk_rope_head_dim], dim=-1)
        latent_TC = torch.cat([self.kv_a_layernorm(c_TC), shared_TR], dim=-1)
        if at is not None:
            o_THV = self._pooled(q_THK, latent_TC, at)
        else:
            assert packing is not None
            k_THN, shared_TR, v_THV = self._expand(latent_TC)
            if self.watch is not None and self.training:
                self.watch(q_THK, k_THN, shared_TR, packing, self.scale)
            o_THV = mla_prefill(q_THK, k_THN, shared_TR, v_THV, packing, self.scale)
        if self.mla.output_gate:
            o_TC = sigmoid_gate(o_THV, gate[0])
        else:
            o_TC = o_THV.reshape(o_THV.shape[0], -1)
        return self.ranks.sum(self.o_proj(o_TC))

    def _pooled(self, q_THK: Tensor, latent_TC: Tensor, at: Pooled) -> Tensor:
        pool, step = at.pool, at.step
        assert isinstance(pool, LatentPool), type(pool)
        pool.write(latent_TC, step)
        outputs, begin = [], step.num_decoded
        if step.decode is not None:
            outputs.append(self._decode(q_THK[:begin], pool, step.decode))
        for chunks in step.prefill:
            part = slice(begin, begin + chunks.packing.num_tokens)
            outputs.append(self._chunks(q_THK[part], latent_TC[part], pool, chunks))
            begin = part.stop
        return outputs[0] if len(outputs) == 1 else torch.cat(outputs)

    def _decode(self, q_THK: Tensor, pool: LatentPool, decoding: DecodeRange) -> Tensor:
        q_NQHK = q_THK.unflatten(0, (-1, decoding.num_each))
        pages = pool.rows_PBC, decoding.table_NJ, decoding.length_N
        return self._absorbed(q_NQHK, *pages)

    def _chunks(
        self, q_PHK: Tensor, new_PC: Tensor, pool: LatentPool, chunks: PrefillRange
    ) -> Tensor:
        """The rows of all chunks, cached ones in front, are read from their pages as one piece."""
        if chunks.key_row_S is None:
            latent_SC, keys = new_PC, None
        else:
            latent_SC, keys = pool.rows_RC.index_select(0, chunks.key_row_S), chunks.keys
        heads = self.mla.num_heads
        at_once = max(1, EXPANDED // (latent_SC.shape[0] * self._expanded_width))
        if at_once >= heads:
            expanded = self._expand(latent_SC)
            return mla_prefill(q_PHK, *expanded, chunks.packing, self.scale, keys)
        o_PHV = q_PHK.new_empty(*q_PHK.shape[:2], self.mla.v_head_dim)
        for first in range(0, heads, at_once):
            part = slice(first, first + at_once)
            expanded = self._expand(latent_SC, part)
            o_PHV[:, part] = mla_prefill(
                q_PHK[:, part], *expanded, chunks.packing, self.scale, keys
            )
        return o_PHV

    @property
    def _expanded_width(self) -> int:
        """Numbers of a row's key and value in a head."""
        return self.mla.qk_nope_head_dim + self.mla.v_head_dim

    def _expand(
        self, latent_SC: Tensor, heads: slice | None = None
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Of rows: keys [S, H, N] of (these) heads, keys [S, R] of all heads, values [S, H, V]."""
        mla, width = self.mla, self._expanded_width
        c_SC, shared_SR = latent_SC.split([mla.kv_lora_rank, mla.qk_rope_head_dim], dim=-1)
        if heads is None:
            kv = self.kv_b_proj(c_SC)
        else:
            kv = linear(c_SC, self.kv_b_proj.weight[heads.start * width : heads.stop * width])
        k_SHN, v_SHV = kv.view(-1, kv.shape[1] // width, width).split(
            [mla.qk_nope_head_dim, mla.v_head_dim], dim=-1
        )
        return k_SHN, shared_SR, v_SHV

    def _absorbed(
        self, q_NQHK: Tensor, rows_PSC: Tensor, table_NW: Tensor, length_N: Tensor
    ) -> Tensor:
        """[NQ, H, V] of attention in latent space: W_UK moves to the query, W_UV to the result."""
        mla = self.mla
        weight_HXC = self.kv_b_proj.weight.view(mla.num_heads, -1, mla.kv_lora_rank)
        own_THK, shared_THR = q_NQHK.flatten(0, 1).split(
            [mla.qk_nope_head_dim, mla.qk_rope_head_dim], dim=-1
        )
        q_THC = queries(own_THK, weight_HXC[:, : mla.qk_nope_head_dim], shared_THR)
        q_NQHC = q_THC.view(*q_NQHK.shape[:3], -1)
        pages = rows_PSC, table_NW, length_N
        mixed_NQHC = mla_decode(q_NQHC, *pages, mla.kv_lora_rank, self.scale)
        mixed_HTC = mixed_NQHC.flatten(0, 1).transpose(0, 1)
        o_HTV = mixed_HTC @ weight_HXC[:, mla.qk_nope_head_dim :].transpose(1, 2)
        return o_HTV.transpose(0, 1)
