"""A token request becomes a sequence, or is refused."""

from __future__ import annotations

import math
from collections.abc import Collection

from perilune.core.errors import ContextLengthError, RequestError
from perilune.core.types import EngineInfo, SamplingParams, TokenRequest
from perilune.engine.grammar_compiler import GrammarCompiler
from perilune.engine.grammar_state import GrammarState
from perilune.engine.sampling_state import SamplingState
from perilune.engine.sequence import TokenSequence

_RANGES: dict[str, tuple[float, float]] = {
    "temperature": (0, math.inf),
    "top_p": (0, 1),
    "min_p": (0, 1),
    "top_k": (0, math.inf),
    "presence_penalty": (-100, 100),
    "frequency_penalty": (-100, 100),
    "repetition_penalty": (1e-6, 1e6),
}
"""Least and greatest value, themselves allowed unless infinite. Wider than what HTTP clients may
send, narrow enough for logits to stay finite."""
_MAX_BIAS = 1000.0
MAX_PIN_S = 86_400


def admit(
    request: TokenRequest, info: EngineInfo, grammars: GrammarCompiler | None = None
) -> TokenSequence:
    """Checks `request` against the model; the answer is cut to what the context leaves.

    Blocks while a grammar is compiled.

    Raises:
        ContextLengthError: the prompt leaves no room for one token.
        RequestError: an empty prompt, an id outside the vocabulary, a bad parameter, a grammar for
            an engine without `grammars`.
        GrammarError: as `GrammarCompiler.start`.
        OverloadedError: so.
    """
    if not request.prompt_ids:
        raise RequestError("the prompt is empty", param="prompt")
    if request.max_tokens < 1:
        raise RequestError(
            f"max_tokens must be at least 1, not {request.max_tokens}", param="max_tokens"
        )
    if request.pin_s is not None and not 0 < request.pin_s <= MAX_PIN_S:
        raise RequestError(f"a pin lasts up to {MAX_PIN_S} s, not {request.pin_s}", param="pin_s")
    prompt_len = len(request.prompt_ids)
    if prompt_len >= info.max_context:
        raise ContextLengthError(
            f"the prompt has {prompt_len} tokens; the model's context holds {info.max_context}, "
            "of which the answer needs at least one",
            param="prompt",
        )
    _check_ids(request.prompt_ids, info.vocab_size, "prompt")
    _check_sampling(request.sampling, info.vocab_size)
    stop_ids = request.stop_ids if request.ignore_eos else request.stop_ids | info.eos_ids
    grammar = _start_grammar(request, stop_ids, grammars)
    return TokenSequence(
        request=request,
        stop_ids=stop_ids,
        max_tokens=min(request.max_tokens, info.max_context - prompt_len),
        sampling=SamplingState(request.sampling, request.prompt_ids, grammar),
    )


def _start_grammar(
    request: TokenRequest, stop_ids: frozenset[int], grammars: GrammarCompiler | None
) -> GrammarState | None:
    if request.grammar is None:
        return None
    if grammars is None:
        raise RequestError(
            "this engine was started without grammars, and cannot hold an answer to one",
            code="unsupported",
        )
    if request.ignore_eos:
        raise RequestError("a grammar ends with a stop token, which ignore_eos would ignore")
    return grammars.start(request.grammar, stop_ids)


def _check_ids(token_ids: Collection[int], vocab_size: int, param: str) -> None:
    for token_id in (min(token_ids, default=0), max(token_ids, default=0)):
        if not 0 <= token_id < vocab_size:
            raise RequestError(
                f"{param} holds token id {token_id}; the vocabulary ends at {vocab_size - 1}",
                param=param,
            )


def _check_sampling(params: SamplingParams, vocab_size: int) -> None:
    for name, (least, greatest) in _RANGES.items():
        value = getattr(params, name)
        if not (least <= value <= greatest and math.isfinite(value)):
            raise RequestError(
                f"{name} must lie between {least:g} and {greatest:g}, not {value}", param=name
            )
    if params.logprobs is not None and not 0 <= params.logprobs <= vocab_size:
        raise RequestError(
            f"logprobs must lie between 0 and {vocab_size}, not {params.logprobs}",
            param="logprobs",
        )
    _check_ids(params.logit_bias, vocab_size, "logit_bias")
    for token_id, bias in params.logit_bias.items():
        if not abs(bias) <= _MAX_BIAS:
            raise RequestError(
                f"logit_bias of token {token_id} must lie between {-_MAX_BIAS:g} and "
                f"{_MAX_BIAS:g}, not {bias}",
                param="logit_bias",
            )
