"""Response bodies of the OpenAI endpoints. A field left at its default stays out of the JSON."""

from __future__ import annotations

from typing import Any

from msgspec import UNSET, Struct, UnsetType

from perilune.core.types import Usage


class CompletionDetails(Struct):
    reasoning_tokens: int = 0


class PromptDetails(Struct):
    cached_tokens: int = 0
    written_tokens: int = 0
    """Not of OpenAI: of prompt and answer, what later requests can begin with from now on."""
    pinned_tokens: int = 0
    """Not of OpenAI: of the prompt, what stays for `cache_ttl_s`."""


class UsageBody(Struct):
    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    completion_tokens_details: CompletionDetails
    prompt_tokens_details: PromptDetails


def usage_body(usage: Usage) -> UsageBody:
    return UsageBody(
        prompt_tokens=usage.prompt_tokens,
        completion_tokens=usage.completion_tokens,
        total_tokens=usage.prompt_tokens + usage.completion_tokens,
        completion_tokens_details=CompletionDetails(usage.reasoning_tokens),
        prompt_tokens_details=PromptDetails(
            usage.cached_tokens, usage.written_tokens, usage.pinned_tokens
        ),
    )


class TopLogprob(Struct):
    token: str
    logprob: float
    bytes: list[int]


class TokenLogprobBody(Struct):
    token: str
    logprob: float
    bytes: list[int]
    top_logprobs: list[TopLogprob]


class ChatLogprobs(Struct):
    content: list[TokenLogprobBody]
    refusal: None = None
    reasoning_content: list[TokenLogprobBody] | UnsetType = UNSET
    """Not of OpenAI: the tokens of the reasoning, which `content` leaves out."""


class FunctionDelta(Struct):
    name: str | UnsetType = UNSET
    arguments: str | UnsetType = UNSET


class ToolCallDeltaBody(Struct):
    function: FunctionDelta
    index: int | UnsetType = UNSET
    """In chunks only."""
    id: str | UnsetType = UNSET
    type: str | UnsetType = UNSET


class Delta(Struct):
    role: str | UnsetType = UNSET
    content: str | UnsetType = UNSET
    reasoning_content: str | UnsetType = UNSET
    tool_calls: list[ToolCallDeltaBody] | UnsetType = UNSET


class ChunkChoice(Struct):
    index: int
    delta: Delta
    logprobs: ChatLogprobs | None = None
    finish_reason: str | None = None


class AssistantMessage(Struct):
    content: str | None
    role: str = "assistant"
    refusal: None = None
    reasoning_content: str | UnsetType = UNSET
    tool_calls: list[ToolCallDeltaBody] | UnsetType = UNSET


class ChatChoice(Struct):
    index: int
    message: AssistantMessage
    logprobs: ChatLogprobs | None
    finish_reason: str


class CompletionLogprobs(Struct):
    tokens: list[str]
    token_logprobs: list[float]
    top_logprobs: list[dict[str, float]]
    text_offset: list[int]
    """Characters of the choice's text before each token."""


class CompletionChoice(Struct):
    index: int
    text: str
    logprobs: CompletionLogprobs | None = None
    finish_reason: str | None = None


class Answer(Struct):
    """A whole answer or a chunk of one: `object` says which."""

    id: str
    object: str
    created: int
    model: str
    system_fingerprint: str
    choices: list[Any]
    usage: UsageBody | UnsetType | None = UNSET
