"""Text of requests inside a grammar: it is never syntax."""

from __future__ import annotations

import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from llguidance import LLMatcher, LLTokenizer

from perilune.text import lark
from perilune.text.errors import TextError
from perilune.text.lark import LarkText

BYTES = LLTokenizer("byte")


def accepts(grammar: str, text: str) -> bool:
    matcher = LLMatcher(BYTES, grammar, log_level=0)
    assert not matcher.is_error(), matcher.get_error()
    data = [*text.encode()]
    return matcher.try_consume_tokens(data) == len(data) and matcher.is_accepting()


@given(st.text(min_size=1, max_size=8))
@example('"')
@example("\\")
@example("\x00\x1f\x7f\x80\u2028")
@example("// a <[3]> %json")
def test_a_literal_is_itself(text):
    grammar = LarkText()
    grammar.rule("start", lark.literal(text), at=f"field\n{text}")
    assert accepts(str(grammar), text)
    assert not accepts(str(grammar), text + "x")


@pytest.mark.parametrize(
    ("pattern", "text"),
    [
        ("/", "/"),
        (r"\/", "/"),
        ("a//b", "a//b"),
        ("\n", "\n"),
        ("#", "#"),
        ("", ""),
        (r"\\", "\\"),
        ("\x7f", "\x7f"),
    ],
)
def test_an_expression_ends_where_it_should(pattern, text):
    assert accepts(f"start: {lark.regex(pattern)}\n", text)


def test_a_lone_surrogate_is_refused():
    for quote in (lark.literal, lark.regex):
        with pytest.raises(TextError, match="surrogate"):
            quote("\ud800")
