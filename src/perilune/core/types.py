"""Frozen values that cross rooms: token requests and events, chat messages, parts and usage."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

import msgspec

FinishReason = Literal["stop", "length", "abort", "error"]
"""Why the engine ended a sequence: a stop token, a token limit, a cancelled request, a fault."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams:
    """How the next token is drawn. Order: bias, penalties, temperature, top-k, top-p, min-p."""

    temperature: float = 1.0
    """0 is greedy: the highest logit, the lowest id on a tie."""
    top_p: float = 1.0
    top_k: int = 0
    """0 keeps every token."""
    min_p: float = 0.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    seed: int | None = None
    """The same seed gives the same tokens whatever else is in the batch; None draws one."""
    logit_bias: Mapping[int, float] = field(default_factory=dict)
    logprobs: int | None = None
    """None: no log-probabilities; k >= 0: of the chosen token and of the k most likely ones."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Grammar:
    """What the generated tokens have to spell. The engine hands the text to its grammar library."""

    kind: Literal["llguidance"] = "llguidance"
    text: str
    """A Lark grammar of llguidance, or its JSON list of grammars. A comment line says, for errors,
    which field of a request the line below it comes from."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenTable:
    """What a grammar has to know of a vocabulary."""

    tokens: tuple[bytes, ...]
    """By id; empty for an id that is no token."""
    control_ids: frozenset[int]
    """Tokens that are never text, whatever their bytes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenRequest:
    """Token ids in: one sequence for the engine."""

    request_id: str
    """The sequences of one request (several prompts, several choices) share it: requests take turns
    in the engine, however many sequences each of them brings."""
    prompt_ids: tuple[int, ...]
    max_tokens: int
    sampling: SamplingParams = SamplingParams()
    stop_ids: frozenset[int] = frozenset()
    """Generation ends after any of these; the stop token itself is reported as an event."""
    ignore_eos: bool = False
    grammar: Grammar | None = None
    """Holds every token but the stop tokens, which are allowed where the grammar may end."""
    priority: int = 0
    """The lower comes first: for places in the batch, for memory, for prompt tokens of a step. It
    takes the place of a running one that comes later, which goes on when there is room again."""
    tenant: str = ""
    """Tenants take turns, as their requests do: none keeps others waiting by asking a lot."""
    pin_s: float | None = None
    """Keeps what is cached of the prompt where it is for so long after the first token, whatever
    else is wanted; None: until the memory is."""


@dataclass(frozen=True, slots=True)
class TokenLogprob:
    token_id: int
    logprob: float
    top: tuple[tuple[int, float], ...] = ()
    """The most likely (token id, log-probability) pairs, best first."""


class TokenEvent(msgspec.Struct, frozen=True, kw_only=True):
    """Token events out: one generated token, or the end without one (`token_id is None`).

    One is made for every token of every stream, in the engine and again in front of it; a frozen
    dataclass takes several times as long to make.
    """

    request_id: str
    token_id: int | None
    logprob: TokenLogprob | None = None
    finish_reason: FinishReason | None = None
    error: str | None = None
    """Set exactly when `finish_reason == "error"`."""
    cached_tokens: int = 0
    """Of the prompt, those that a prefix cache had. The same in every event of a sequence."""
    written_tokens: int = 0
    """Those that the sequence has added to the prefix cache so far: its answer comes at the end."""
    pinned_tokens: int = 0
    """Of the prompt, those that are kept for `TokenRequest.pin_s`; 0: pins have taken what they
    may."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineInfo:
    """What an engine says of itself."""

    model_id: str
    vocab_size: int
    max_context: int
    """Prompt and generated tokens together."""
    eos_ids: frozenset[int]
    details: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineStats:
    """A snapshot for /metrics."""

    num_running: int = 0
    num_waiting: int = 0
    prompt_tokens_total: int = 0
    generated_tokens_total: int = 0
    prefix_cache_hit_tokens_total: int = 0
    """Of the prompt tokens, those that a prefix cache had."""
    drafted_tokens_total: int = 0
    """Guessed and verified by speculation."""
    accepted_tokens_total: int = 0
    """Of these, the ones that were right."""
    preemptions_total: int = 0
    """How often a sequence gave its memory to an older one."""
    cache_bytes: int = 0
    restarts_total: int = 0
    """How often the engine's process was started again."""
    failure: str | None = None
    """Why the engine can serve nothing now, for good or until it has been started again; None while
    it can."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Usage:
    prompt_tokens: int = 0
    completion_tokens: int = 0
    reasoning_tokens: int = 0
    cached_tokens: int = 0
    """Of the prompt, read from a prefix cache."""
    written_tokens: int = 0
    """Of prompt and answer, added to it."""
    pinned_tokens: int = 0
    """Of the prompt, kept there for as long as the request asked for."""


# --- chat -----------------------------------------------------------------------------------

Role = Literal["system", "user", "assistant", "tool"]


@dataclass(frozen=True, slots=True, kw_only=True)
class TextPart:
    text: str


@dataclass(frozen=True, slots=True, kw_only=True)
class ImagePart:
    """A reference to an image. Text-only builds refuse it, with the reason."""

    url: str
    width: int | None = None
    height: int | None = None


Part = TextPart | ImagePart


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolCall:
    """`arguments` is the JSON text as it came: parsed late, never re-serialised on the way."""

    id: str
    name: str
    arguments: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Message:
    role: Role
    content: tuple[Part, ...] = ()
    name: str | None = None
    reasoning: str | None = None
    tool_calls: tuple[ToolCall, ...] = ()
    tool_call_id: str | None = None
    tools: tuple[Mapping[str, Any], ...] = ()
    """Tools that a system message in mid-conversation declares (K3)."""


ToolChoice = Literal["auto", "none", "required"]


@dataclass(frozen=True, slots=True, kw_only=True)
class ResponseFormat:
    type: Literal["text", "json_object", "json_schema", "regex", "grammar"] = "text"
    schema: Mapping[str, Any] | None = None
    strict: bool = True
    """Whether the answer is held to `schema`, or only to be JSON."""
    pattern: str | None = None
    """Of `regex`: what the whole answer matches."""
    grammar: str | None = None
    """Of `grammar`: Lark text."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ChatRequest:
    """Messages in. `tools` are OpenAI tool objects: `{"type": "function", "function": {...}}`."""

    request_id: str
    model: str
    messages: tuple[Message, ...]
    tools: tuple[Mapping[str, Any], ...] = ()
    tool_choice: ToolChoice = "auto"
    tool_choice_name: str | None = None
    """The function that must be called, with `tool_choice == "required"`."""
    parallel_tool_calls: bool = True
    """Whether one answer may hold several calls."""
    response_format: ResponseFormat = ResponseFormat()
    priority: int = 0
    """The lower comes first."""
    tenant: str = ""
    """Who asks, as far as places are shared out among those who do."""
    timeout_s: float | None = None
    """The answer is complete by then, or given up."""
    cache_ttl_s: float | None = None
    """How long the prompt is to stay in the prefix cache, whatever else is wanted there."""
    thinking: bool = True
    thinking_effort: Literal["low", "medium", "high", "max"] | None = None
    max_tokens: int | None = None
    """None: as many as the context holds."""
    stop: tuple[str, ...] = ()
    sampling: SamplingParams = SamplingParams()


@dataclass(frozen=True, slots=True, kw_only=True)
class CompletionRequest:
    """Raw text or token ids in, text out; no chat format."""

    request_id: str
    model: str
    prompt: str | tuple[int, ...]
    max_tokens: int = 16
    stop: tuple[str, ...] = ()
    sampling: SamplingParams = SamplingParams()
    echo: bool = False
    ignore_eos: bool = False
    """The answer goes on to `max_tokens`, whatever the model wants: for measurements."""
    priority: int = 0
    tenant: str = ""
    timeout_s: float | None = None
    cache_ttl_s: float | None = None
    """These as in `ChatRequest`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TextLogprob:
    """One token of output text with its log-probability, as the OpenAI wire format wants it."""

    token: str
    token_bytes: bytes
    logprob: float
    top: tuple[tuple[str, bytes, float], ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class ReasoningDelta:
    text: str
    logprobs: tuple[TextLogprob, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class TextDelta:
    text: str
    logprobs: tuple[TextLogprob, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolCallDelta:
    """A piece of call `index` (from 0). The first piece carries `id` and `name`."""

    index: int
    id: str | None = None
    name: str | None = None
    arguments: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Finish:
    """The last event of every stream that did not raise."""

    reason: Literal["stop", "length", "tool_calls", "abort"]
    usage: Usage


ChatEvent = ReasoningDelta | TextDelta | ToolCallDelta | Finish
