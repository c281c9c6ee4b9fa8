"""What a corpus is made of: one text or one conversation, with where it came from."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from perilune.core.types import Message, ResponseFormat

Kind = Literal["chat", "code", "prose", "synthetic"]
KINDS: tuple[Kind, ...] = ("chat", "code", "prose", "synthetic")


@dataclass(frozen=True, slots=True, kw_only=True)
class Conversation:
    """Messages with the request options that stand beside them; ends with an assistant turn."""

    messages: tuple[Message, ...]
    tools: tuple[Mapping[str, Any], ...] = ()
    thinking: bool = True
    """False: the prompt opens the response at once and no turn has a think channel."""
    thinking_effort: Literal["low", "medium", "high", "max"] | None = None
    response_format: ResponseFormat = field(default_factory=ResponseFormat)


@dataclass(frozen=True, slots=True, kw_only=True)
class Document:
    """Exactly one of `text` and `conversation` is set."""

    kind: Kind
    source: str
    text: str | None = None
    conversation: Conversation | None = None
    split_key: str | None = None
    """Documents with the same key fall on the same side of the split; None: the content."""


def message_text(message: Message) -> str:
    """The text parts of a message in order, without markup."""
    return "".join(getattr(part, "text", "") for part in message.content)


def plain_text(document: Document) -> str:
    """What a reader sees: the text, or tools, reasoning, content and calls in lines, no markup."""
    if document.text is not None:
        return document.text
    conversation = document.conversation
    assert conversation is not None
    pieces = [json.dumps(tool, sort_keys=True) for tool in conversation.tools]
    if conversation.response_format.schema is not None:
        pieces.append(json.dumps(conversation.response_format.schema, sort_keys=True))
    for message in conversation.messages:
        pieces += [message.reasoning or "", message_text(message)]
        pieces += [f"{call.name} {call.arguments}" for call in message.tool_calls]
    return "\n".join(piece for piece in pieces if piece)


def stable_hash(text: str) -> int:
    """64 bits of BLAKE2b: the same on every machine and in every process."""
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "big")
