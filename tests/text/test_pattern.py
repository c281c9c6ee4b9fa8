"""Patterns that match anywhere, as expressions of a whole text."""

from __future__ import annotations

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from perilune.text.errors import TextError
from perilune.text.pattern import plain_classes, whole_text

pieces = st.sampled_from(
    [
        "a",
        "b",
        "|",
        "(a|b)",
        "[ab|$]",
        r"\$",
        r"\|",
        r"[]a]",
        "[^^a]",
        r"\d",
        r"[\d\]]",
        "a*",
        "^",
        "$",
    ]
)


@given(st.lists(pieces, max_size=6).map("".join), st.text("ab|$^]1", max_size=5))
def test_the_same_texts_match(pattern, text):
    try:
        whole = whole_text(pattern, "p")
    except TextError:
        assert re.search(r"[^|(].*\^|\$.*[^|)]", pattern)
        return
    # Python's $ matches before a line break at the end, too; there is none in these texts.
    assert bool(re.fullmatch(whole, text)) == bool(re.search(pattern, text))


@pytest.mark.parametrize("pattern", ["(^a|b)", "a^", "a$b", "(?:a$)"])
def test_anchors_inside_are_refused(pattern):
    with pytest.raises(TextError, match=r"\^ and \$ are read at the ends"):
        whole_text(pattern, "p")


def test_classes_are_plain():
    assert plain_classes(r"\d[\w-]\D\\d\s[[]") == r"[0-9][0-9A-Za-z_-][^0-9]\\d\s[\[]"
