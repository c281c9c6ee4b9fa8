"""The grammar of a message in Kimi K2's and Kimi Linear's format, up to its `<|im_end|>`."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from perilune.core.types import ChatRequest, Grammar
from perilune.text import im_names, lark
from perilune.text.answer_rules import AnswerRules, add_answer, answer_rules, to_grammar
from perilune.text.errors import TextError
from perilune.text.json_schema import normalise
from perilune.text.lark import LarkText

_CALL_TOKENS = (
    im_names.CALLS_BEGIN,
    im_names.CALL_BEGIN,
    im_names.ARGUMENTS_BEGIN,
    im_names.CALL_END,
    im_names.CALLS_END,
)


def im_grammar(request: ChatRequest, special_ids: Mapping[str, int]) -> Grammar | None:
    """None for a request that holds its answer to nothing.

    Raises:
        TextError: a schema, an expression or a grammar that cannot be held to, or a call where the
            tokenizer has no tokens for calls.
    """
    wanted = answer_rules(request)
    if wanted is None:
        return None
    if wanted.must_call and not special_ids.keys() >= {*_CALL_TOKENS}:
        raise TextError("this model's tokenizer has no tokens for calls", param="tool_choice")
    rules = LarkText()
    rules.rule("start", f"{_thoughts(special_ids)}message")
    rules.rule("message", lark.choice(_messages(rules, wanted, special_ids)))
    return to_grammar(rules, wanted.response_format)


def _thoughts(ids: Mapping[str, int]) -> str:
    if not ids.keys() >= {im_names.THINK, im_names.END_THINK}:
        return ""
    begin, end = lark.token(ids[im_names.THINK]), lark.token(ids[im_names.END_THINK])
    return f"({begin} {lark.ANY_TEXT} {end})? "


def _messages(rules: LarkText, wanted: AnswerRules, ids: Mapping[str, int]) -> Iterator[str]:
    can_call = bool(wanted.tools) and ids.keys() >= {*_CALL_TOKENS}
    if not wanted.must_call:
        text = add_answer(rules, wanted.response_format)
        yield f"{text} calls?" if can_call and wanted.is_free_text else text
    if can_call:
        _add_calls(rules, wanted, ids)
        if wanted.must_call or not wanted.is_free_text:
            yield "calls"


def _add_calls(rules: LarkText, wanted: AnswerRules, ids: Mapping[str, int]) -> None:
    begin, call, arguments, end_call, end = (lark.token(ids[name]) for name in _CALL_TOKENS)
    rules.rule("calls", f"{begin} call{{1,{wanted.max_calls}}} {end}")
    names = [f"call_{i}" for i in range(len(wanted.tools))]
    rules.rule("call", lark.choice(names))
    for name, tool in zip(names, wanted.tools, strict=True):
        rules.rule(name.upper(), f"{lark.literal(f'functions.{tool.name}:')} /[0-9]{{1,4}}/")
        schema = {} if tool.is_free else normalise(tool.parameters, at=tool.at)
        is_object = schema.get("type", "object") == "object"
        body = lark.json_value({**schema, "type": "object"} if is_object else schema)
        rules.rule(f"{name}_json", body, at=tool.at)
        rules.rule(name, f"{call} {name.upper()} {arguments} {name}_json {end_call}")
