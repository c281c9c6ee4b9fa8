"""The grammar of a K3 message: thoughts, then a response and calls, as a request wants them.

It begins where the prompt ends, in the open think or response element, and ends before
`<|end_of_msg|>`, which is a stop token.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from perilune.core.types import ChatRequest, Grammar
from perilune.text import k3_names, lark
from perilune.text.answer_rules import AnswerRules, add_answer, answer_rules, to_grammar
from perilune.text.argument_types import ARGUMENT_TYPES, ByType
from perilune.text.callable_tools import CallableTool
from perilune.text.json_schema import Schema, normalise
from perilune.text.lark import LarkText
from perilune.text.schema_keywords import refuse
from perilune.text.xtml_markup import escape

_TOP_LEVEL = ("anyOf", "oneOf", "allOf", "enum", "const")


def xtml_grammar(request: ChatRequest, special_ids: Mapping[str, int]) -> Grammar | None:
    """None for a request that holds its answer to nothing.

    Raises:
        TextError: a schema, an expression or a grammar that cannot be held to.
    """
    wanted = answer_rules(request)
    if wanted is None:
        return None
    return _XtmlGrammar(special_ids).build(wanted, thinking=request.thinking)


class _XtmlGrammar:
    def __init__(self, special_ids: Mapping[str, int]) -> None:
        self._open = lark.token(special_ids[k3_names.OPEN])
        self._close = lark.token(special_ids[k3_names.CLOSE])
        self._sep = lark.token(special_ids[k3_names.SEP])
        self._rules = LarkText()

    def build(self, wanted: AnswerRules, *, thinking: bool) -> Grammar:
        rules = self._rules
        thoughts = (
            f"{lark.ANY_TEXT} {self._end('think')} {self._begin('response')} " if thinking else ""
        )
        rules.rule("start", f"{thoughts}message {self._end('message')}")
        rules.rule("message", lark.choice(self._messages(wanted)))
        if wanted.tools:
            self._add_calls(wanted)
        return to_grammar(rules, wanted.response_format)

    def _messages(self, wanted: AnswerRules) -> Iterator[str]:
        """What is wanted as text is the whole answer: a call stands beside an empty response."""
        if not wanted.must_call:
            text = add_answer(self._rules, wanted.response_format)
            tools = " tools?" if wanted.tools and wanted.is_free_text else ""
            yield f"{text} {self._end('response')}{tools}"
        if wanted.tools and not (wanted.is_free_text and not wanted.must_call):
            yield f"{self._end('response')} tools"

    def _add_calls(self, wanted: AnswerRules) -> None:
        rules = self._rules
        calls = f"call{{1,{wanted.max_calls}}}"
        rules.rule("tools", f"{self._begin('tools')} {calls} {self._end('tools')}")
        names = [f"call_{i}" for i in range(len(wanted.tools))]
        rules.rule("call", lark.choice(names))
        index = "/[1-9][0-9]{0,2}/" if wanted.max_calls > 1 else '"1"'
        for name, tool in zip(names, wanted.tools, strict=True):
            head = lark.literal(f'call tool="{escape(tool.name)}" index="')
            rules.rule(name.upper(), f"{head} {index} {lark.literal(chr(34))}")
            arguments = " ".join(self._arguments(name, tool))
            rules.rule(
                name, f"{self._open} {name.upper()} {self._sep} {arguments} {self._end('call')}"
            )

    def _arguments(self, name: str, tool: CallableTool) -> Iterator[str]:
        """Names of rules, one an argument, in the order of the schema.

        Only arguments that the schema names are written: a repeated one spoils a call, and a
        grammar cannot count names that it does not know.
        """
        schema = _object_schema(tool)
        properties: Schema = schema.get("properties", {})
        required = schema.get("required", ())
        rest = schema.get("additionalProperties", True)
        for i, key in enumerate(dict.fromkeys([*properties, *required])):
            is_required = key in required
            at = f"{tool.at}.properties.{key}"
            allowed = properties.get(key, rest)
            if allowed is False:
                if is_required:
                    refuse(at, "it is required, and the schema allows no value for it")
                continue
            rule = f"{name}_{i}"
            part: Schema = {} if tool.is_free or allowed is True else allowed
            self._add_argument(rule, key, part | _definitions(schema), at)
            yield rule if is_required else f"{rule}?"

    def _add_argument(self, name: str, key: str, schema: Schema, at: str) -> None:
        by_type = ByType(schema, at)
        options: list[str] = []
        for kind in ARGUMENT_TYPES:
            value = self._add_value(f"{name}_{kind}", kind, by_type, at)
            if value is not None:
                head = lark.literal(f'argument key="{escape(key)}" type="{kind}"')
                options.append(f"{self._open} {head} {self._sep} {value} {self._end('argument')}")
        if not options:
            refuse(at, "no value matches the schema")
        self._rules.rule(name, lark.choice(options))

    def _add_value(self, name: str, kind: str, by_type: ByType, at: str) -> str | None:
        """A string stands raw, another value as JSON."""
        if kind == "string":
            options = by_type.strings()
            if not options:
                return None
            body = lark.choice(" & ".join(map(lark.regex, parts or [".*"])) for parts in options)
            name = name.upper()
        else:
            schema = by_type.restricted(kind)
            if schema is None:
                return None
            body = lark.json_value(schema)
        self._rules.rule(name, body, at=at)
        return name

    def _begin(self, tag: str) -> str:
        return f"{self._open} {lark.literal(tag)} {self._sep}"

    def _end(self, tag: str) -> str:
        return f"{self._close} {lark.literal(tag)} {self._sep}"


def _object_schema(tool: CallableTool) -> Schema:
    """The schema of the arguments, whose properties are arguments of their own in this format."""
    if tool.is_free:
        properties = tool.parameters.get("properties")
        required = tool.parameters.get("required")
        names: Schema = {key: {} for key in (properties if isinstance(properties, Mapping) else ())}
        wanted = [n for n in required if n in names] if isinstance(required, list) else []
        return {"properties": names, "required": wanted}
    schema = normalise(tool.parameters, at=tool.at)
    for _ in range(len(schema.get("$defs", ()))):
        if "$ref" not in schema:
            break
        target = schema["$defs"][schema["$ref"].rpartition("/")[2]]
        schema = (target if isinstance(target, dict) else {}) | _definitions(schema)
    if schema.get("type", "object") != "object" or any(key in schema for key in _TOP_LEVEL):
        refuse(tool.at, "this model's chat format needs an object with `properties` at the top")
    if schema.get("minProperties", 0) > len(schema.get("required", ())):
        refuse(tool.at, "`minProperties` beyond `required` cannot be held to at the top")
    return schema


def _definitions(schema: Schema) -> Schema:
    return {"$defs": schema["$defs"]} if "$defs" in schema else {}
