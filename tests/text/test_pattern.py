"""Patterns that match anywhere, as expressions of a whole text."""

from __future__ import annotations

import re

import pytest
import regex
from hypothesis import given
from hypothesis import strategies as st
from llguidance import LLMatcher, LLTokenizer

from perilune.text import lark
from perilune.text.errors import TextError
from perilune.text.pattern import common_pattern, schema_pattern, whole_text

BYTES = LLTokenizer("byte")
SOME = [chr(i) for i in (*range(0x3100), *range(0x3100, 0x11000, 31), 0xFEFF, 0x1CCF9, 0x1D7D8)]
SOME = [c for c in SOME if not "\ud800" <= c <= "\udfff"]

pieces = st.sampled_from(
    (
        *("a", "b", "|", "(a|b)", "[ab|$]", r"\$", r"\|", "[]a]", "[^^a]", r"\d", r"[\d\]]"),
        *(r"[^\d]", ".", "a*", "^", "$"),
    )
)


@given(st.lists(pieces, max_size=6).map("".join), st.text("ab|$^]1", max_size=5))
def test_the_same_texts_match(pattern, text):
    try:
        whole = whole_text(pattern, "p")
    except TextError:
        assert re.search(r"[^|(].*\^|\$.*[^|)]", pattern)
        return
    whole = re.sub(r"\\x\{(\w+)\}", r"\\u\1", whole)  # as Python writes it
    # Python's $ matches before a line break at the end, too; there is none in these texts.
    assert bool(regex.fullmatch(whole, text)) == bool(re.search(pattern, text))


@pytest.mark.parametrize("pattern", ["(^a|b)", "a^", "a$b", "(?:a$)"])
def test_anchors_inside_are_refused(pattern):
    with pytest.raises(TextError, match=r"\^ and \$ are read at the ends"):
        whole_text(pattern, "p")


@pytest.mark.parametrize(
    "pattern",
    [r"\d", r"\D", r"\w", r"\W", r"\s", r"\S", ".", r"[^\da]", r"[^\w]", r"[^\s]", r"[\s\S]"],
)
def test_what_matches_also_matches_in_every_dialect(pattern):
    """Python's own classes are those of Unicode, and with re.ASCII those of ECMAScript."""
    matcher = LLMatcher(BYTES, f"start: {lark.regex(schema_pattern(pattern))}", log_level=0)
    assert not matcher.is_error(), matcher.get_error()
    held = [c for c in SOME if is_matched(matcher.deep_copy(), c)]
    assert len(held) >= 6
    for flags in (0, re.ASCII):
        allowed = re.compile(pattern, flags)
        assert all(allowed.fullmatch(c) for c in held)
    assert "\u2028" not in held or "." not in pattern


def is_matched(matcher: LLMatcher, text: str) -> bool:
    data = [*text.encode()]
    return matcher.try_consume_tokens(data) == len(data) and matcher.is_accepting()


def test_a_pattern_of_a_request_keeps_its_dots():
    assert common_pattern(r"(?s:.)\d[[]") == r"(?s:.)[0-9][\[]"
