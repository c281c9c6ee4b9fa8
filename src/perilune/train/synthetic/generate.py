"""The synthetic set: draws tasks by weight until the wanted amount of text is there."""

from __future__ import annotations

import random
from collections.abc import Iterator

from perilune.core.types import Message, TextPart
from perilune.train.document import Conversation, Document, message_text, plain_text
from perilune.train.synthetic import (
    arithmetic,
    facts,
    identity,
    json_answers,
    python_tasks,
    recall,
    words,
)
from perilune.train.synthetic import tools as tool_use
from perilune.train.synthetic.chat import Chat, Draw

SHARES: dict[Draw, float] = {
    arithmetic.draw_sum: 20,
    arithmetic.draw_story: 6,
    arithmetic.draw_comparison: 5,
    words.draw_copy: 4,
    words.draw_spelling: 1,
    words.draw_reverse: 3,
    words.draw_count: 4,
    words.draw_case: 3,
    words.draw_sort: 4,
    words.draw_list: 2,
    recall.draw_keys: 8,
    recall.draw_needle: 8,
    recall.draw_memory: 8,
    identity.draw_identity: 4,
    identity.draw_small_talk: 3,
    facts.draw_country: 4,
    facts.draw_animal: 3,
    facts.draw_calendar: 3,
    facts.draw_grammar: 3,
    facts.draw_simple: 4,
    tool_use.draw_tool_use: 14,
    tool_use.draw_tool_call: 2,
    json_answers.draw_json: 6,
    python_tasks.draw_python: 10,
}
"""Relative numbers of conversations."""
_CLOSED = frozenset(
    (
        identity.draw_identity,
        identity.draw_small_talk,
        facts.draw_country,
        facts.draw_animal,
        facts.draw_calendar,
        facts.draw_grammar,
        facts.draw_simple,
        python_tasks.draw_python,
    )
)
"""Tasks with few questions: only exact repeats stay together in the split, so that no fact is
missing from the training side."""
_SYSTEM = (
    "You are a helpful assistant.",
    "You are perilune nano.",
    "You are a precise assistant. Give short answers.",
    "Answer briefly.",
    "You are a friendly assistant.",
)
_EFFORTS = ("low", "medium", "high", "max")


def generate(num_bytes: int, seed: int = 0) -> Iterator[Document]:
    """Conversations, and a few modules of plain code, with at least `num_bytes` of text in all."""
    rng = random.Random(seed)
    draws, shares = list(SHARES), list(SHARES.values())
    total = 0
    while total < num_bytes:
        if rng.random() < 0.01:
            document = Document(
                kind="synthetic", source="synthetic", text=python_tasks.draw_completion(rng)
            )
        else:
            draw = rng.choices(draws, shares)[0]
            chat = _with_more_turns(rng, draw(rng), draws, shares)
            document = _document(rng, chat, is_closed=draw in _CLOSED)
        total += len(plain_text(document).encode())
        yield document


def _with_more_turns(
    rng: random.Random, chat: Chat, draws: list[Draw], shares: list[float]
) -> Chat:
    """A fifth of the plain chats get a greeting, a second task or thanks around them."""
    if chat.tools or chat.response_format.type != "text" or rng.random() > 0.2:
        return chat
    before = identity.greeting_turns(rng).messages if rng.random() < 0.4 else ()
    after: tuple[Message, ...] = ()
    other = rng.choices(draws, shares)[0](rng)
    if not other.tools and other.response_format.type == "text":
        after = other.messages
    if rng.random() < 0.3:
        after += identity.closing_turns(rng).messages
    return chat._replace(messages=(*before, *chat.messages, *after))


def _document(rng: random.Random, chat: Chat, *, is_closed: bool) -> Document:
    has_reasoning = any(message.reasoning for message in chat.messages)
    thinking = has_reasoning or rng.random() < 0.5
    messages = chat.messages
    if rng.random() < 0.1:
        system = TextPart(text=rng.choice(_SYSTEM))
        messages = (Message(role="system", content=(system,)), *messages)
    conversation = Conversation(
        messages=messages,
        tools=chat.tools,
        thinking=thinking,
        thinking_effort=rng.choice(_EFFORTS) if thinking and rng.random() < 0.06 else None,
        response_format=chat.response_format,
    )
    key = repr(conversation) if is_closed else _first_question(messages)
    return Document(kind="synthetic", source="synthetic", conversation=conversation, split_key=key)


def _first_question(messages: tuple[Message, ...]) -> str:
    return message_text(next(message for message in messages if message.role == "user"))
