"""What a request wants an answer to be, as rules that every chat format's grammar begins with."""

from __future__ import annotations

import json
from typing import NamedTuple

from perilune.core.types import ChatRequest, Grammar, ResponseFormat
from perilune.text import lark
from perilune.text.callable_tools import CallableTool, callable_tools, is_strict
from perilune.text.errors import TextError
from perilune.text.json_schema import normalise
from perilune.text.lark import LarkText
from perilune.text.pattern import common_pattern

MAX_CALLS = 64
"""Of one answer: a model that has lost its way must come to an end."""
MAX_PATTERN_BYTES = 4_096
MAX_GRAMMAR_BYTES = 8_192
MAX_RULES = 256
_ANSWER = "answer"
_FIELD = "response_format"


class AnswerRules(NamedTuple):
    """Which of text and calls an answer may be."""

    tools: list[CallableTool]
    """To call; empty where no call is allowed."""
    must_call: bool
    max_calls: int
    response_format: ResponseFormat

    @property
    def is_free_text(self) -> bool:
        return self.response_format.type == "text"


def answer_rules(request: ChatRequest) -> AnswerRules | None:
    """None for a request that holds its answer to nothing: its tokens stay as they are.

    Raises:
        TextError: a tool is none.
    """
    may_call = request.tool_choice != "none"
    tools = callable_tools(request) if may_call else []
    must_call = request.tool_choice == "required"
    has_limit = bool(request.tools) and not (may_call and request.parallel_tool_calls)
    is_held = request.response_format.type != "text" or must_call or has_limit
    if not (is_held or (may_call and is_strict(request))):
        return None
    single = request.tool_choice_name is not None or not request.parallel_tool_calls
    return AnswerRules(
        tools=tools,
        must_call=must_call,
        max_calls=1 if single else MAX_CALLS,
        response_format=request.response_format,
    )


def add_answer(rules: LarkText, wanted: ResponseFormat) -> str:
    """Adds what the text of an answer has to be; returns the name of it in a rule.

    Raises:
        TextError: a schema, an expression or a grammar that cannot be held to.
    """
    match wanted.type:
        case "text":
            return lark.ANY_TEXT
        case "json_object":
            rules.rule("answer_text", lark.json_value({"type": "object"}))
        case "json_schema":
            at = f"{_FIELD}.json_schema.schema"
            if wanted.schema is None:
                raise TextError(f"{_FIELD} json_schema needs a schema", param=_FIELD)
            schema = normalise(wanted.schema, at=at) if wanted.strict else {}
            rules.rule("answer_text", lark.json_value(schema), at=at)
        case "regex":
            at, pattern = f"{_FIELD}.pattern", wanted.pattern or ""
            _check_size(pattern, MAX_PATTERN_BYTES, at)
            rules.rule("answer_text", lark.regex(common_pattern(pattern)), at=at)
        case "grammar":
            _check_grammar(wanted.grammar or "")
            return f"@{_ANSWER}"
    return "answer_text"


def to_grammar(rules: LarkText, wanted: ResponseFormat) -> Grammar:
    """The finished grammar, with the request's own beside it if there is one."""
    text = str(rules)
    if wanted.type == "grammar":
        own = {"name": _ANSWER, "lark_grammar": wanted.grammar}
        text = json.dumps({"grammars": [{"lark_grammar": text}, own]})
    return Grammar(text=text)


def _check_grammar(text: str) -> None:
    at = f"{_FIELD}.grammar"
    _check_size(text, MAX_GRAMMAR_BYTES, at)
    if "%json" in text:
        raise TextError(f"{at}: %json is not read here; json_schema is", param=at)
    if sum(":" in line for line in text.splitlines()) > MAX_RULES:
        raise TextError(f"{at}: more than {MAX_RULES} rules", param=at)


def _check_size(text: str, limit: int, at: str) -> None:
    size = len(text.encode(errors="replace"))
    if size > limit:
        raise TextError(f"{at}: {size} bytes; at most {limit} are allowed", param=at)
