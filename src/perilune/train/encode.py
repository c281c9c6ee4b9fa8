"""Documents to token ids: plain text ends with [EOS], chats are K3's XTML."""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import numpy as np
import numpy.typing as npt

from perilune.text.tiktoken_ranks import RankTokenizer
from perilune.text.tokenizer import Segment
from perilune.text.xtml import render
from perilune.train.document import Conversation, Document

_MAX_STRUCTURE_CHARS = 12
"""Segments up to this length are mostly tag and attribute names: few, and worth remembering."""


class DocumentEncoder:
    def __init__(self, tokenizer: RankTokenizer) -> None:
        self._tokenizer = tokenizer
        self._dtype = np.uint16 if tokenizer.vocab_size <= 1 << 16 else np.uint32
        self._eos = tokenizer.special_ids["[EOS]"]
        self._structure = lru_cache(maxsize=8192)(
            lambda text, markup: tuple(tokenizer.encode_segments([(text, markup)]))
        )

    def encode(self, document: Document) -> npt.NDArray[Any]:
        if document.text is not None:
            return np.array([*self._tokenizer.encode(document.text), self._eos], self._dtype)
        assert document.conversation is not None
        return self._encode_segments(render_conversation(document.conversation))

    def _encode_segments(self, segments: list[Segment]) -> npt.NDArray[Any]:
        ids: list[int] = []
        for segment in segments:
            if segment.markup or len(segment.text) <= _MAX_STRUCTURE_CHARS:
                piece = self._structure(segment.text, segment.markup)
            else:
                piece = self._tokenizer.encode(segment.text)
            ids += piece
        return np.array(ids, self._dtype)


def render_conversation(conversation: Conversation) -> list[Segment]:
    """The whole conversation; the response format stands where it does in a prompt: before the
    last assistant message."""
    prompt = render(
        conversation.messages[:-1],
        tools=conversation.tools,
        response_format=conversation.response_format,
        thinking=conversation.thinking,
        thinking_effort=conversation.thinking_effort,
        generation_prompt=False,
    )
    reply = render(
        conversation.messages[-1:], thinking=conversation.thinking, generation_prompt=False
    )
    return prompt + reply
