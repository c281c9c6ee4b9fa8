"""The whole network: embedding, decoder layers, head. Start reading here.

Legend: T packed tokens, N sequences, D model width, V vocabulary.
Parameter names equal the released checkpoints' (without K3's `language_model.` prefix), except
that routed experts are stacked (`experts.w13`, `experts.w2`).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor, nn

from perilune.kernels.common.packing import Packing
from perilune.model.attn_res import AttnResStream, PlainStream, Query
from perilune.model.config import ModelConfig
from perilune.model.kda import KDA, KDAInputs
from perilune.model.linear import Embedding, Linear, linear
from perilune.model.mla import MLA
from perilune.model.moe import MLP, Experts, MoE, Router
from perilune.model.norm import RMSNorm
from perilune.model.pools import Pooled, Pools, StatePool, StepOnPools
from perilune.model.ranks import ALONE, Ranks, share_of
from perilune.model.step import PAGE, Step


class DecoderLayer(nn.Module):
    def __init__(self, config: ModelConfig, index: int, ranks: Ranks = ALONE) -> None:
        """`config` is this rank's, as `share_of` makes it."""
        super().__init__()
        d, eps, moe = config.hidden_size, config.rms_norm_eps, config.moe
        self.ranks = ranks
        self.self_attn = MLA(config, ranks) if config.is_mla(index) else KDA(config, ranks)
        self.is_moe = config.is_moe(index)
        if moe is not None and self.is_moe:
            self.block_sparse_moe = MoE(config, moe, ranks)
        else:
            self.mlp = MLP(config, config.intermediate_size)
        self.input_layernorm = RMSNorm(d, eps)
        self.post_attention_layernorm = RMSNorm(d, eps)
        if config.attn_res_block_size is not None:
            self.starts_block = index % config.attn_res_block_size == 0
            self.self_attention_res_norm = RMSNorm(d, eps)
            self.self_attention_res_proj = Query(d)
            self.mlp_res_norm = RMSNorm(d, eps)
            self.mlp_res_proj = Query(d)

    def freeze(self) -> None:
        if hasattr(self, "mlp_res_proj"):
            self.self_attention_res_proj.freeze(self.self_attention_res_norm)
            self.mlp_res_proj.freeze(self.mlp_res_norm)

    def forward(
        self,
        stream: AttnResStream | PlainStream,
        packing: Packing | None,
        at: Pooled | None,
    ) -> AttnResStream | PlainStream:
        """Changes `stream` and returns it."""
        attention_norm, mlp_norm = self.input_layernorm, self.post_attention_layernorm
        if isinstance(stream, PlainStream):
            stream.add(self.self_attn(attention_norm(stream.hidden), packing, at))
            stream.add(self._feed_forward(mlp_norm(stream.hidden)))
            return stream
        query, norm = self.self_attention_res_proj, self.self_attention_res_norm
        x_TD = stream.read(query, norm, attention_norm)
        if self.starts_block:
            stream.commit()
        stream.add(self.self_attn(x_TD, packing, at))
        x_TD = stream.read(self.mlp_res_proj, self.mlp_res_norm, mlp_norm)
        stream.add(self._feed_forward(x_TD))
        return stream

    def _feed_forward(self, x_TD: Tensor) -> Tensor:
        return self.block_sparse_moe(x_TD) if self.is_moe else self.ranks.sum(self.mlp(x_TD))


class Backbone(nn.Module):
    def __init__(self, config: ModelConfig, ranks: Ranks = ALONE) -> None:
        """`config` is this rank's."""
        super().__init__()
        d, eps = config.hidden_size, config.rms_norm_eps
        self.attn_res = config.attn_res_block_size is not None
        self.compute_dtype: torch.dtype | None = None
        """Activations of the forward pass; None: the dtype of the weights. The trainer keeps fp32
        weights and computes in bf16."""
        self.run_layer: Callable[..., AttnResStream | PlainStream] = DecoderLayer.__call__
        """How a layer without a memory is called: (layer, stream, packing, None) -> stream. The
        trainer may forget what can be recomputed."""
        self.embed_tokens = Embedding(config.vocab_size, d)
        self.layers = nn.ModuleList(
            DecoderLayer(config, i, ranks) for i in range(config.num_layers)
        )
        if self.attn_res:
            self.output_attn_res_norm = RMSNorm(d, eps)
            self.output_attn_res_proj = Query(d)
        self.norm = RMSNorm(d, eps)

    def freeze(self) -> None:
        if self.attn_res:
            self.output_attn_res_proj.freeze(self.output_attn_res_norm)

    def forward(
        self,
        token_ids_T: Tensor,
        packing: Packing | None,
        on_pools: StepOnPools | None = None,
    ) -> Tensor:
        """Hidden vectors [T, D] before the final norm: of a pack without a memory, or of a step."""
        embedding_TD = self.embed_tokens(token_ids_T)
        if self.compute_dtype is not None:
            embedding_TD = embedding_TD.to(self.compute_dtype)
        stream = AttnResStream(embedding_TD) if self.attn_res else PlainStream(embedding_TD)
        for i, layer in enumerate(self.layers):
            if on_pools is None:
                assert packing is not None
                stream = self.run_layer(layer, stream, packing, None)
            else:
                stream = layer(stream, packing, on_pools.of(i))
        if isinstance(stream, PlainStream):
            return stream.hidden
        return stream.read(self.output_attn_res_proj, self.output_attn_res_norm)


def freeze(root: nn.Module) -> None:
    """Of every layer below `root`: projections with one input fused, weights held as they run."""
    fused: set[Linear] = set()
    for module in root.modules():
        if isinstance(module, Backbone | DecoderLayer | KDA | MLA | MLP | MoE | Experts | Router):
            module.freeze()
        if isinstance(module, KDA | MLA):
            fused.update(module.inputs.parts)
        if isinstance(module, MLP):
            fused.update(module.gate_up.parts)
    for module in root.modules():
        if isinstance(module, Linear) and module not in fused:
            module.freeze()


class Verified(NamedTuple):
    logits_RV: Tensor
    drafted: list[KDAInputs]
    """What `Transformer.accept` needs of each KDA layer."""


class Transformer(nn.Module):
    """A decoder of either family. Parameters start uninitialised: see `init` and `load`.

    With `ranks`, one rank's part of it: each is fed the same steps, and each gets all logits.
    """

    page_len = PAGE
    """Tokens of a page of `new_pools`."""

    def __init__(self, config: ModelConfig, ranks: Ranks = ALONE) -> None:
        """Raises ConfigError where the ranks cannot have equal parts."""
        super().__init__()
        self.config, self.ranks = config, ranks
        self.share = share_of(config, ranks)
        """`config` with the heads that are here: caches and pools are of these."""
        self.model = Backbone(self.share, ranks)
        if not config.tie_word_embeddings:
            self.lm_head = Linear(config.hidden_size, len(ranks.part(config.vocab_size)))

    @property
    def head_weight(self) -> Tensor:
        tied = self.config.tie_word_embeddings
        return self.model.embed_tokens.weight if tied else self.lm_head.weight

    def new_pools(self, *, slots: int, pages: int) -> Pools:
        """Zeros, on the device of the weights and in their dtype; states as `Pools.of`."""
        weight = self.head_weight
        return Pools.of(
            self.share, slots=slots, pages=pages, device=weight.device, dtype=weight.dtype
        )

    def freeze(self) -> Transformer:
        """Prepares for inference: no gradients, projections with one input fused."""
        self.eval().requires_grad_(False)
        freeze(self)
        return self

    def forward(self, token_ids_T: Tensor, packing: Packing, last_only: bool = False) -> Tensor:
        """Logits [T, V] in fp32 of a pack without a memory; with `last_only` those of each
        sequence's last token [N, V]."""
        assert token_ids_T.shape == (packing.num_tokens,), token_ids_T.shape
        hidden_TD = self.model(token_ids_T, packing)
        if last_only and not packing.is_one_each:
            hidden_TD = hidden_TD[packing.last_T]
        return self._logits(hidden_TD)

    def step(self, token_ids_T: Tensor, pools: Pools, step: Step) -> Tensor:
        """fp32 logits [R, V]: of all tokens that decode, then, chunk by chunk, of the last
        `num_logits` tokens. The pools' slots and pages are what they are after all T tokens.

        `token_ids_T`: as `step` has them, any id for padded rows. `step` is of `pools.step`.
        """
        return self._step(token_ids_T, StepOnPools(pools.layers, step))

    def verify(self, token_ids_T: Tensor, pools: Pools, step: Step) -> Verified:
        """As `step`, but states of sequences that decode stay as they were (`step` is made with
        `verify`), until `accept` says how many of their tokens count."""
        assert step.decode is not None, "nothing to verify"
        assert step.decode.keep_N is not None, "the step was not made to verify"
        on_pools = StepOnPools(pools.layers, step, [])
        return Verified(self._step(token_ids_T, on_pools), on_pools.drafted or [])

    def accept(self, verified: Verified, pools: Pools, step: Step, keep_N: Tensor) -> None:
        """Moves the states of the step's sequences that decode on by `keep_N` of their tokens
        (int64, on the device, 0 to Q). Once, before the next step."""
        assert step.decode is not None
        decoding = step.decode._replace(keep_N=keep_N)
        kdas = [layer.self_attn for layer in self.model.layers if isinstance(layer.self_attn, KDA)]
        states = [pool for pool in pools.layers if isinstance(pool, StatePool)]
        for kda, inputs, pool in zip(kdas, verified.drafted, states, strict=True):
            kda.decode(inputs, pool, decoding)

    def _step(self, token_ids_T: Tensor, on_pools: StepOnPools) -> Tensor:
        step = on_pools.step
        assert token_ids_T.shape == step.row_T.shape, (token_ids_T.shape, step.row_T.shape)
        hidden_TD = self.model(token_ids_T, None, on_pools)
        if step.logit_R is not None:
            hidden_TD = hidden_TD.index_select(0, step.logit_R)
        return self._logits(hidden_TD)

    def _logits(self, hidden_TD: Tensor) -> Tensor:
        hidden_TD = self.model.norm(hidden_TD)
        if self.config.tie_word_embeddings:
            own = self.ranks.part(self.config.vocab_size)
            logits_TV = linear(hidden_TD, self.head_weight[own.start : own.stop])
        else:
            logits_TV = self.lm_head(hidden_TD)
        return self.ranks.joined(logits_TV).float()
