"""What a cached prefix saves and what it weighs."""

from __future__ import annotations

from dataclasses import dataclass

from perilune.model.config import ModelConfig
from perilune.model.sizes import BF16_BYTES, STATE_BYTES, count_parameters


@dataclass(frozen=True, slots=True, kw_only=True)
class CostModel:
    """FLOPs of a prefill and bytes of what it leaves, of one sequence on one card."""

    token_flops: float
    """Of a token, whatever stands before it."""
    pair_flops: float
    """Of attention between a token and one before it."""
    row_bytes: int
    """Of a token's latents, in all layers."""
    state_bytes: int
    """Of a slot, in all layers."""

    @staticmethod
    def of(
        config: ModelConfig, *, row_bytes: int = BF16_BYTES, state_bytes: int = STATE_BYTES
    ) -> CostModel:
        """By the model's sizes; the arguments are bytes of one number in a row and in a state.

        A multiplied parameter is 2 FLOPs. KDA: per head about 4 K V multiply-adds a token (decay,
        the delta's read, the write, the output's read). MLA: scores and values of a pair.
        """
        kda, mla = config.kda, config.mla
        num_mla = len(config.mla_layers)
        num_kda = config.num_layers - num_mla
        inner = kda.num_heads * kda.head_dim
        recurrence = 2 * 4 * inner * kda.head_dim
        pair = 2 * mla.num_heads * (mla.qk_head_dim + mla.v_head_dim)
        window = (kda.conv_width - 1) * 3 * inner * row_bytes
        return CostModel(
            token_flops=2.0 * count_parameters(config).activated + num_kda * recurrence,
            pair_flops=float(num_mla * pair),
            row_bytes=num_mla * mla.cache_width * row_bytes,
            state_bytes=num_kda * (inner * kda.head_dim * state_bytes + window),
        )

    def flops(self, start: int, end: int) -> float:
        """Of a prefill of the tokens from `start` to `end`, those before `start` being cached."""
        return (end - start) * (self.token_flops + self.pair_flops * (start + end) / 2)

    def saved_per_byte(self, start: int, end: int, num_bytes: float) -> float:
        """FLOPs saved a byte, in units of what a row of latents saves without attention.

        Marconi (arXiv 2411.19379), 4.2: a state saves what lies between it and the one before.
        """
        unit = self.token_flops / max(self.row_bytes, 1)
        return self.flops(start, end) / max(num_bytes, 1) / unit
