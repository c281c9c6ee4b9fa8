"""What one sequence's sampling remembers, and how it shapes its logits.

Legend: V vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from perilune.core.types import SamplingParams
from perilune.engine.grammar_state import GrammarState
from perilune.engine.likeliest import is_filtering
from perilune.engine.randomness import draw_seed, uniform


class SamplingState:
    """Parameters, seed, the place in a grammar and, only if a penalty asks for them, counts."""

    def __init__(
        self,
        params: SamplingParams,
        prompt_ids: Sequence[int],
        grammar: GrammarState | None = None,
    ) -> None:
        self.params = params
        self.grammar = grammar
        self.seed = draw_seed() if params.seed is None else params.seed
        self.num_drawn = 0
        """Generated tokens so far; numbers the random draws."""
        self.is_drawn = params.temperature > 0
        self._has_bias = bool(params.logit_bias)
        self._has_counts = params.presence_penalty != 0 or params.frequency_penalty != 0
        self._has_repetition = params.repetition_penalty != 1
        self.is_plain = (
            params.logprobs is None
            and grammar is None
            and not self.is_shaping
            and not (self.is_drawn and is_filtering(params))
        )
        """The next token is the likeliest one, or drawn from all, and nothing else is asked."""
        self._prompt_ids = prompt_ids
        self._new_ids: list[int] = []
        """Generated tokens that the counts do not hold yet."""
        self._count_V: Tensor | None = None
        self._seen_V: Tensor | None = None
        self._bias: tuple[Tensor, Tensor] | None = None

    @property
    def is_shaping(self) -> bool:
        """Whether `shape` changes anything."""
        return self._has_bias or self._has_counts or self._has_repetition

    @property
    def depends_on_output(self) -> bool:
        """Whether what may follow a token is known only when that token is."""
        return self.grammar is not None or self._has_counts or self._has_repetition

    def uniform(self, ahead: int = 0) -> float:
        """The random number of the next token, in [0, 1), or of one that comes `ahead` later."""
        return uniform(self.seed, self.num_drawn + ahead)

    def append(self, token_id: int) -> None:
        """Takes note of a generated token."""
        self.num_drawn += 1
        if self.grammar is not None:
            self.grammar.advance(token_id)
        if self._has_counts or self._has_repetition:
            self._new_ids.append(token_id)

    def shape(self, logits_V: Tensor) -> None:
        """Applies bias and penalties to one row of logits, in place.

        1. Bias: l_j += b_j.
        2. Repetition r (arXiv 1909.05858, for either sign of l): every token j that the prompt or
           the output holds gets l_j / r where l_j > 0, else l_j * r.
        3. Frequency f and presence p (the OpenAI API reference), with c_j the number of times j
           was generated: l_j -= f * c_j + p * [c_j > 0].
        """
        params = self.params
        if self._has_bias:
            ids, values = self._bias_on(logits_V)
            logits_V.index_add_(0, ids, values)
        if not (self._has_repetition or self._has_counts):
            return
        count_V, seen_V = self._counts(logits_V)
        penalty = params.repetition_penalty
        penalised_V = torch.where(logits_V > 0, logits_V / penalty, logits_V * penalty)
        torch.where(seen_V, penalised_V, logits_V, out=logits_V)
        logits_V -= params.frequency_penalty * count_V
        logits_V -= params.presence_penalty * (count_V > 0)

    def _bias_on(self, logits_V: Tensor) -> tuple[Tensor, Tensor]:
        if self._bias is None:
            bias = self.params.logit_bias
            self._bias = (
                torch.tensor(list(bias), device=logits_V.device),
                torch.tensor([float(b) for b in bias.values()], device=logits_V.device),
            )
        return self._bias

    def _counts(self, logits_V: Tensor) -> tuple[Tensor, Tensor]:
        """How often each token was generated, and whether it occurs at all."""
        if self._count_V is None or self._seen_V is None:
            self._count_V = torch.zeros_like(logits_V)
            self._seen_V = torch.zeros_like(logits_V, dtype=torch.bool)
            self._seen_V[torch.tensor(self._prompt_ids, device=logits_V.device)] = True
        if self._new_ids:
            new_ids = torch.tensor(self._new_ids, device=logits_V.device)
            self._count_V.index_add_(0, new_ids, torch.ones_like(new_ids, dtype=torch.float32))
            self._seen_V[new_ids] = True
            self._new_ids.clear()
        return self._count_V, self._seen_V
