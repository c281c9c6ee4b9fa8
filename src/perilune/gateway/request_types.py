"""Request bodies of the two OpenAI endpoints, as far as they are read.

A field that is not declared here is ignored: clients send many. A declared one is checked, and
null means that it was left out.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from msgspec import Meta, Struct

MAX_CHOICES = 16
MAX_PROMPTS = 32
MAX_SEQUENCES = 64
"""Prompts times choices of one request: well below what an engine queues."""
MAX_STOPS = 16
MAX_TOP_LOGPROBS = 20

TokenId = Annotated[int, Meta(ge=0)]
NonEmpty = Annotated[str, Meta(min_length=1)]
PositiveInt = Annotated[int, Meta(ge=1)]
Probability = Annotated[float, Meta(ge=0, le=1)]
Penalty = Annotated[float, Meta(ge=-2, le=2)]
FunctionName = Annotated[str, Meta(pattern=r"^[A-Za-z0-9_.-]{1,128}\Z")]


class StreamOptions(Struct):
    include_usage: bool | None = None


class SamplingBody(Struct, kw_only=True):
    """What both endpoints share."""

    model: str
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    n: Annotated[int, Meta(ge=1, le=MAX_CHOICES)] | None = None
    max_tokens: PositiveInt | None = None
    stop: NonEmpty | Annotated[list[NonEmpty], Meta(max_length=MAX_STOPS)] | None = None
    temperature: Annotated[float, Meta(ge=0, le=2)] | None = None
    top_p: Annotated[float, Meta(gt=0, le=1)] | None = None
    top_k: Annotated[int, Meta(ge=-1)] | None = None
    """0 and -1 keep every token."""
    min_p: Probability | None = None
    presence_penalty: Penalty | None = None
    frequency_penalty: Penalty | None = None
    repetition_penalty: Annotated[float, Meta(gt=0, le=10)] | None = None
    seed: Annotated[int, Meta(ge=-(2**63), le=2**63 - 1)] | None = None
    logit_bias: dict[str, Annotated[float, Meta(ge=-100, le=100)]] | None = None
    user: Annotated[str, Meta(max_length=256)] | None = None
    """Users take turns where requests have to wait."""
    priority: Annotated[int, Meta(ge=-1000, le=1000)] | None = None
    """Not of OpenAI, as in other servers: the lower comes first."""
    timeout_s: Annotated[float, Meta(gt=0, le=86_400)] | None = None
    """Not of OpenAI: an answer that is not complete by then is given up."""
    cache_ttl_s: Annotated[float, Meta(gt=0, le=86_400)] | None = None
    """Not of OpenAI: the prompt stays in the prefix cache for so long."""


class CompletionBody(SamplingBody, kw_only=True):
    prompt: str | list[str | TokenId | list[TokenId]]
    echo: bool | None = None
    logprobs: Annotated[int, Meta(ge=0, le=MAX_TOP_LOGPROBS)] | None = None
    best_of: int | None = None
    suffix: str | None = None
    ignore_eos: bool | None = None
    """Not of OpenAI, as in other servers: load tests need answers of a known length."""


class TextPartBody(Struct, tag_field="type", tag="text"):
    text: str


class ImageUrl(Struct):
    url: str


class ImagePartBody(Struct, tag_field="type", tag="image_url"):
    image_url: ImageUrl


Content = str | list[TextPartBody | ImagePartBody]


class FunctionCallBody(Struct):
    name: str
    arguments: str


class ToolCallBody(Struct):
    id: str
    function: FunctionCallBody
    type: Literal["function"] = "function"


class SystemBody(Struct, tag_field="role", tag="system"):
    content: Content | None = None
    name: str | None = None
    tools: list[dict[str, Any]] | None = None
    """Tools that become known in the middle of a conversation."""


class DeveloperBody(Struct, tag_field="role", tag="developer"):
    """The newer name of a system message."""

    content: Content
    name: str | None = None


class UserBody(Struct, tag_field="role", tag="user"):
    content: Content
    name: str | None = None


class AssistantBody(Struct, tag_field="role", tag="assistant"):
    content: Content | None = None
    name: str | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None
    """The name that some clients use for `reasoning_content`."""
    tool_calls: list[ToolCallBody] | None = None


class ToolBody(Struct, tag_field="role", tag="tool"):
    content: Content
    tool_call_id: str
    name: str | None = None


MessageBody = SystemBody | DeveloperBody | UserBody | AssistantBody | ToolBody


class FunctionBody(Struct):
    name: FunctionName
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class ToolDeclaration(Struct):
    type: Literal["function"]
    function: FunctionBody


class NamedFunction(Struct):
    name: str


class ToolChoiceBody(Struct):
    type: Literal["function"]
    function: NamedFunction


class JsonSchemaBody(Struct):
    schema: dict[str, Any]
    name: str | None = None
    strict: bool | None = None
    """False leaves the schema to the prompt."""


class ResponseFormatBody(Struct):
    """`regex` and `grammar` are perilune's own."""

    type: Literal["text", "json_object", "json_schema", "regex", "grammar"]
    json_schema: JsonSchemaBody | None = None
    pattern: NonEmpty | None = None
    grammar: NonEmpty | None = None


class TemplateOptions(Struct):
    """`chat_template_kwargs`, the way other servers switch thinking."""

    thinking: bool | None = None
    enable_thinking: bool | None = None


Effort = Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"]


class ChatBody(SamplingBody, kw_only=True):
    messages: Annotated[list[MessageBody], Meta(min_length=1)]
    max_completion_tokens: PositiveInt | None = None
    """Wins over its old name, `max_tokens`."""
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Meta(ge=0, le=MAX_TOP_LOGPROBS)] | None = None
    tools: list[dict[str, Any]] | None = None
    """Checked as `ToolDeclaration`, kept as they came."""
    tool_choice: str | ToolChoiceBody | None = None
    parallel_tool_calls: bool | None = None
    response_format: ResponseFormatBody | None = None
    reasoning_effort: Effort | None = None
    chat_template_kwargs: TemplateOptions | None = None
    functions: Any = None
    function_call: Any = None
