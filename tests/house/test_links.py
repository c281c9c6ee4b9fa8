"""Every document's links to files lead somewhere, and its make targets exist."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
DOCUMENTS = sorted(
    path
    for pattern in ("*.md", "docs/**/*.md", "src/**/*.md", "changes/*.md")
    for path in ROOT.glob(pattern)
)
TARGETS = set(re.findall(r"^([a-z]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))


@pytest.mark.parametrize("path", DOCUMENTS, ids=lambda path: str(path.relative_to(ROOT)))
def test_links_and_targets(path):
    text = path.read_text(encoding="utf-8")
    for target in re.findall(r"\]\((?!https?:|#)([^)#]+)", text):
        assert (path.parent / target).exists(), target
    named = re.findall(r"(?:^|`)make ([a-z][a-z ]*[a-z])", text, re.MULTILINE)
    assert {word for words in named for word in words.split()} <= TARGETS
