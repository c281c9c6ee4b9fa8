"""K3's chat format: `xtml.render` and a tokenizer that has K3's control tokens."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from perilune.core.types import ChatRequest, Grammar, Message
from perilune.text import k3_names
from perilune.text.chat import TrainingIds, check_messages, offered_tools, training_ids
from perilune.text.tokenizer import Tokenizer
from perilune.text.xtml import render
from perilune.text.xtml_grammar import xtml_grammar
from perilune.text.xtml_parser import XtmlParser


class XtmlFormat:
    """Messages to ids and a parser for what comes back. Immutable; safe to share."""

    def __init__(self, tokenizer: Tokenizer, *, default_effort: str | None = None) -> None:
        """`default_effort`: thinking level of a request that names none (None: no message)."""
        self.tokenizer = tokenizer
        self.stop_ids = tokenizer.eos_ids | {tokenizer.special_ids[k3_names.END_OF_MSG]}
        self._default_effort = default_effort

    def check(self, request: ChatRequest) -> None:
        """Raises TextError if the request is one that cannot be written."""
        check_messages(request.messages)
        offered_tools(request)

    def encode(self, request: ChatRequest) -> list[int]:
        """Prompt ids, ending inside the open think (or response) element. Raises as `check`."""
        self.check(request)
        segments = render(
            request.messages,
            tools=offered_tools(request),
            tool_choice=request.tool_choice,
            response_format=request.response_format,
            thinking=request.thinking,
            thinking_effort=request.thinking_effort or self._default_effort,
        )
        return self.tokenizer.encode_segments(segments)

    def grammar(self, request: ChatRequest) -> Grammar | None:
        """As `ChatFormat.grammar`: K3's thoughts are free, and the grammar holds what follows."""
        return xtml_grammar(request, self.tokenizer.special_ids)

    def encode_conversation(
        self,
        messages: Sequence[Message],
        *,
        tools: Sequence[Mapping[str, Any]] = (),
        thinking: bool = True,
        thinking_effort: str | None = None,
        first_trained: int = 0,
    ) -> TrainingIds:
        """Ids and loss mask of a finished conversation, for training.

        Trained are the tokens that the model itself writes: from behind the generation prompt to
        `<|end_of_msg|>`, of every assistant message from `messages[first_trained]` on. Arguments
        that are not JSON are never trained.
        """
        check_messages(messages)
        segments = render(
            messages,
            tools=tools,
            thinking=thinking,
            thinking_effort=thinking_effort or self._default_effort,
            generation_prompt=False,
            first_trained=first_trained,
        )
        return training_ids(self.tokenizer, segments)

    def parser(self, request: ChatRequest) -> XtmlParser:
        return XtmlParser(self.tokenizer, thinking=request.thinking)
