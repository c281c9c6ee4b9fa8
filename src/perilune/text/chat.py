"""What a chat format is: messages to ids, and ids back to reasoning, text and tool calls."""

from __future__ import annotations

import json
import uuid
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple, Protocol

from perilune.core.types import (
    ChatRequest,
    Grammar,
    ImagePart,
    Message,
    ReasoningDelta,
    TextDelta,
    TextLogprob,
    ToolCall,
    ToolCallDelta,
)
from perilune.text.errors import TextError
from perilune.text.tokenizer import Segment, Tokenizer

ChatDelta = ReasoningDelta | TextDelta | ToolCallDelta

NoteKind = Literal["malformed", "repaired", "truncated", "call_in_reasoning"]


class ParseNote(NamedTuple):
    """Something a parser met that is not well formed; nothing is mended without a note."""

    kind: NoteKind
    reason: str
    text: str = ""
    """The raw text that was set aside and shows in no delta."""
    call_index: int | None = None
    """The call that came out in spite of it."""


class TrainingIds(NamedTuple):
    """Ids of a whole conversation; `loss_mask[i]` is 1 where the model learns to write `ids[i]`."""

    ids: list[int]
    loss_mask: list[int]


class ChatParser(Protocol):
    """Turns the generated ids of one message into deltas. Never raises on what a model wrote."""

    @property
    def notes(self) -> Sequence[ParseNote]:
        """What was malformed, repaired or cut so far."""
        ...

    @property
    def num_calls(self) -> int:
        """Tool calls that came out so far."""
        ...

    @property
    def reasoning_tokens(self) -> int:
        """Generated tokens that belong to the reasoning."""
        ...

    def feed(self, token_id: int, logprob: TextLogprob | None = None) -> list[ChatDelta]:
        """Deltas that this token completes, none of them empty.

        `logprob` rides on the delta that shows the token's text. A tool call comes out as one
        delta, when its close tag is there: a call that is cut never comes out.
        """
        ...

    def finish(self) -> list[ChatDelta]:
        """Deltas that were waiting, at the end of the generation. Call it once, at the end."""
        ...


class ChatFormat(Protocol):
    """One model family's way of writing a conversation."""

    @property
    def tokenizer(self) -> Tokenizer: ...

    @property
    def stop_ids(self) -> frozenset[int]:
        """Tokens after which an assistant message is over."""
        ...

    def check(self, request: ChatRequest) -> None:
        """Raises TextError if the request is one that this format cannot write."""
        ...

    def encode(self, request: ChatRequest) -> list[int]:
        """Prompt ids, ending where the assistant starts to write. Raises as `check`."""
        ...

    def grammar(self, request: ChatRequest) -> Grammar | None:
        """What the model has to write after the prompt of `request`; None if it may write anything.

        Raises:
            TextError: a schema, an expression or a grammar that an answer cannot be held to.
        """
        ...

    def encode_conversation(
        self,
        messages: Sequence[Message],
        *,
        tools: Sequence[Mapping[str, Any]] = (),
        thinking: bool = True,
        thinking_effort: str | None = None,
        first_trained: int = 0,
    ) -> TrainingIds:
        """Ids and loss mask of a finished conversation; messages before `first_trained` get 0."""
        ...

    def parser(self, request: ChatRequest) -> ChatParser:
        """A new parser for what the model writes after the prompt of `request`."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class ParsedMessage:
    """A whole generated message."""

    reasoning: str = ""
    text: str = ""
    tool_calls: tuple[ToolCall, ...] = ()
    notes: tuple[ParseNote, ...] = field(default=())


def parse_message(parser: ChatParser, ids: Iterable[int]) -> ParsedMessage:
    """Feeds all `ids` to a new `parser` and joins what comes out."""
    deltas = [delta for token_id in ids for delta in parser.feed(token_id)]
    deltas += parser.finish()
    return ParsedMessage(
        reasoning="".join(d.text for d in deltas if isinstance(d, ReasoningDelta)),
        text="".join(d.text for d in deltas if isinstance(d, TextDelta)),
        tool_calls=tuple(
            ToolCall(id=d.id or "", name=d.name or "", arguments=d.arguments)
            for d in deltas
            if isinstance(d, ToolCallDelta)
        ),
        notes=tuple(parser.notes),
    )


def training_ids(tokenizer: Tokenizer, segments: Iterable[Segment]) -> TrainingIds:
    """Ids of the segments, with 1 in the mask for every id of a trained segment."""
    ids: list[int] = []
    loss_mask: list[int] = []
    for segment in segments:
        piece = tokenizer.encode_segments([segment])
        ids += piece
        loss_mask += [int(segment.trained)] * len(piece)
    return TrainingIds(ids, loss_mask)


def new_call_id() -> str:
    """A fresh id for a tool call, in the form that OpenAI clients know."""
    return f"call_{uuid.uuid4().hex[:24]}"


def compact_json(value: object, *, param: str, sort_keys: bool = False) -> str:
    """JSON without spaces, non-ASCII kept. Raises TextError naming `param` if it cannot be."""
    try:
        return json.dumps(
            value, ensure_ascii=False, allow_nan=False, sort_keys=sort_keys, separators=(",", ":")
        )
    except (TypeError, ValueError, RecursionError) as error:
        raise TextError(f"{param} cannot be written as JSON: {error}", param=param) from error


def check_messages(messages: Sequence[Message]) -> None:
    """Raises TextError for what no chat format can write, or a text model cannot read."""
    if not messages:
        raise TextError("messages is empty", param="messages")
    for i, message in enumerate(messages):
        if any(isinstance(part, ImagePart) for part in message.content):
            raise TextError(
                f"messages[{i}] holds an image, and this model reads text only",
                param=f"messages[{i}].content",
                code="unsupported_content",
            )
        if message.tool_calls and message.role != "assistant":
            raise TextError(
                f"messages[{i}] has tool_calls, but its role is {message.role!r}",
                param=f"messages[{i}].tool_calls",
            )


def offered_tools(request: ChatRequest) -> Sequence[Mapping[str, Any]]:
    """The tools to declare: all, or only the one that the request says must be called.

    No format here has words for "call this one function"; a choice of one is the nearest thing.

    Raises:
        TextError: a call is required and there is nothing to call, or the named tool is unknown.
    """
    later = [tool for message in request.messages for tool in message.tools]
    if request.tool_choice == "required" and not request.tools and not later:
        raise TextError("tool_choice requires a call, but there are no tools", param="tool_choice")
    wanted = request.tool_choice_name
    if wanted is None:
        return request.tools
    named = [tool for tool in request.tools if _function_name(tool) == wanted]
    if not named and wanted not in map(_function_name, later):
        raise TextError(f"tool_choice names {wanted!r}, which is no tool", param="tool_choice")
    return named


def _function_name(tool: Mapping[str, Any]) -> object:
    function = tool.get("function")
    return function.get("name") if isinstance(function, Mapping) else None
