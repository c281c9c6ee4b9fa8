"""The OpenAI wire: request bodies into core requests, one for each choice."""

from __future__ import annotations

from dataclasses import dataclass
from typing import cast

import msgspec

from perilune.core.types import ChatRequest, CompletionRequest
from perilune.gateway import json_body
from perilune.gateway.chat_options import (
    num_chat_logprobs,
    refuse_old_functions,
    to_response_format,
    to_thinking,
    to_tool_choice,
)
from perilune.gateway.errors import BodyError
from perilune.gateway.messages import check_tools, to_messages
from perilune.gateway.request_types import (
    MAX_PROMPTS,
    MAX_SEQUENCES,
    ChatBody,
    CompletionBody,
    SamplingBody,
)
from perilune.gateway.sampling import for_choice, to_sampling, to_stop

DEFAULT_COMPLETION_TOKENS = 16
"""What the completions endpoint has always generated when `max_tokens` is left out."""

_CHAT = msgspec.json.Decoder(ChatBody)
_COMPLETION = msgspec.json.Decoder(CompletionBody)


@dataclass(frozen=True, slots=True, kw_only=True)
class Delivery:
    """How the client wants its answer."""

    stream: bool
    include_usage: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class ChatCall:
    requests: tuple[ChatRequest, ...]
    """Choice i is the answer to request i."""
    delivery: Delivery


@dataclass(frozen=True, slots=True, kw_only=True)
class CompletionCall:
    requests: tuple[CompletionRequest, ...]
    """Prompt by prompt, `num_choices` requests each; choice i is the answer to request i."""
    num_choices: int
    delivery: Delivery


def parse_chat(body: bytes, call_id: str) -> ChatCall:
    """Reads the body of `/v1/chat/completions`.

    Raises:
        BodyError: the body is not JSON or a field is wrong; `param` names the field.
    """
    wire = json_body.decode(body, _CHAT)
    refuse_old_functions(wire)
    tools = check_tools(wire.tools, "tools")
    choice = to_tool_choice(wire, tools)
    thinking = to_thinking(wire)
    request = ChatRequest(
        request_id=call_id,
        model=wire.model,
        messages=to_messages(wire.messages),
        tools=tools,
        tool_choice=choice.mode,
        tool_choice_name=choice.name,
        parallel_tool_calls=wire.parallel_tool_calls is not False,
        response_format=to_response_format(wire),
        thinking=thinking.on,
        thinking_effort=thinking.effort,
        max_tokens=wire.max_completion_tokens or wire.max_tokens,
        priority=wire.priority or 0,
        tenant=wire.user or "",
        timeout_s=wire.timeout_s,
        cache_ttl_s=wire.cache_ttl_s,
        stop=to_stop(wire),
        sampling=to_sampling(wire, num_chat_logprobs(wire)),
    )
    return ChatCall(
        requests=tuple(for_choice(request, i) for i in range(wire.n or 1)),
        delivery=_to_delivery(wire),
    )


def parse_completion(body: bytes, call_id: str) -> CompletionCall:
    """Reads the body of `/v1/completions`; raises as `parse_chat`."""
    wire = json_body.decode(body, _COMPLETION)
    _refuse_unsupported(wire)
    num_choices = wire.n or 1
    requests = [
        CompletionRequest(
            request_id=call_id,
            model=wire.model,
            prompt=prompt,
            max_tokens=wire.max_tokens or DEFAULT_COMPLETION_TOKENS,
            stop=to_stop(wire),
            sampling=to_sampling(wire, wire.logprobs),
            echo=bool(wire.echo),
            ignore_eos=bool(wire.ignore_eos),
            priority=wire.priority or 0,
            tenant=wire.user or "",
            timeout_s=wire.timeout_s,
            cache_ttl_s=wire.cache_ttl_s,
        )
        for prompt in _to_prompts(wire)
    ]
    if len(requests) * num_choices > MAX_SEQUENCES:
        raise BodyError(
            f"{len(requests)} prompts with n = {num_choices} make {len(requests) * num_choices}"
            f" sequences; at most {MAX_SEQUENCES} are allowed in one request",
            param="n",
        )
    return CompletionCall(
        requests=tuple(for_choice(r, i) for r in requests for i in range(num_choices)),
        num_choices=num_choices,
        delivery=_to_delivery(wire),
    )


def _to_delivery(wire: SamplingBody) -> Delivery:
    options = wire.stream_options
    if options is not None and not wire.stream:
        raise BodyError("stream_options: needs `stream` to be true", param="stream_options")
    return Delivery(
        stream=bool(wire.stream), include_usage=options is not None and bool(options.include_usage)
    )


def _refuse_unsupported(wire: CompletionBody) -> None:
    if wire.suffix:
        raise BodyError("suffix: filling in the middle is not supported", param="suffix")
    if wire.best_of is not None and wire.best_of != (wire.n or 1):
        raise BodyError("best_of: only the value of `n` is supported", param="best_of")
    if wire.echo and wire.logprobs is not None:
        raise BodyError("echo: cannot be combined with `logprobs`", param="echo")


def _to_prompts(wire: CompletionBody) -> list[str | tuple[int, ...]]:
    """One string, a list of strings, one list of ids or a list of lists of ids."""
    prompt = wire.prompt
    prompts: list[str | tuple[int, ...]]
    if isinstance(prompt, str):
        prompts = [prompt]
    elif len({type(item) for item in prompt}) > 1:
        raise BodyError("prompt: strings, ids and lists cannot be mixed", param="prompt")
    elif prompt and isinstance(prompt[0], int):
        prompts = [tuple(cast(list[int], prompt))]
    else:
        items = cast(list[str | list[int]], prompt)
        prompts = [item if isinstance(item, str) else tuple(item) for item in items]
    if not prompts or not all(prompts):
        raise BodyError("prompt: at least one character or token is needed", param="prompt")
    if len(prompts) > MAX_PROMPTS:
        raise BodyError(
            f"prompt: at most {MAX_PROMPTS} prompts, got {len(prompts)}", param="prompt"
        )
    return prompts
