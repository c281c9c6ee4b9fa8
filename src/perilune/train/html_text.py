"""Documentation pages as plain text: HTML by a small parser, reStructuredText by role removal."""

from __future__ import annotations

import re
from html.parser import HTMLParser

_BLOCKS = frozenset(
    [
        "p",
        "div",
        "section",
        "article",
        "h1",
        "h2",
        "h3",
        "h4",
        "h5",
        "h6",
        "ul",
        "ol",
        "li",
        "dl",
        "dt",
        "dd",
        "table",
        "tr",
        "blockquote",
        "br",
        "hr",
    ]
)
_HIDDEN = frozenset(
    [
        "script",
        "style",
        "head",
        "nav",
        "footer",
        "svg",
        "button",
        "form",
        "noscript",
        "select",
        "sup",
    ]
)
_VOID = frozenset(
    ["br", "hr", "img", "input", "meta", "link", "col", "area", "base", "embed", "source", "wbr"]
)
_BOILERPLATE = re.compile(
    r"(?:^|\s)(?:header|footer|nav|navheader|navfooter|navbar|navigation|sidebar|sphinxsidebar\w*|"
    r"related|toc\w*|headerlink|search\S*|menu|menu-bar|copyright|breadcrumbs?|wy-nav-side|"
    r"docs-sidebar\S*|docs-top-navigation\S*|docs-bottom-navigation\S*|nav-wide-wrapper|"
    r"skip-link|prev-next\S*|sk-landing\S*|sk-sidebar\S*)(?:\s|$)",
    re.I,
)


class _Text(HTMLParser):
    """Collects text outside hidden elements; `pre` keeps its white space."""

    def __init__(self) -> None:
        super().__init__(convert_charrefs=True)
        self.pieces: list[str] = []
        self._open: list[tuple[str, bool]] = []
        self._num_hidden = 0
        self._num_pre = 0

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        if tag in _BLOCKS:
            self.pieces.append("\n\n" if tag in ("p", "pre") or tag[0] == "h" else "\n")
        if tag == "li" and self._num_hidden == 0:
            self.pieces.append("- ")
        if tag in _VOID:
            return
        names = " ".join(value or "" for key, value in attrs if key in ("class", "id", "role"))
        hidden = tag in _HIDDEN or (
            tag in ("div", "ul", "a", "section", "table") and bool(_BOILERPLATE.search(names))
        )
        self._open.append((tag, hidden))
        self._num_hidden += hidden
        if tag == "pre":
            self._num_pre += 1
            self.pieces.append("\n\n")

    def handle_endtag(self, tag: str) -> None:
        if tag in _VOID or all(name != tag for name, _ in self._open):
            return
        while self._open:
            name, hidden = self._open.pop()
            self._num_hidden -= hidden
            self._num_pre -= name == "pre"
            if name == tag:
                break
        if tag in _BLOCKS or tag == "pre":
            self.pieces.append("\n\n" if tag in ("p", "pre") else "\n")

    def handle_data(self, data: str) -> None:
        if self._num_hidden:
            return
        if not self._num_pre:
            data = re.sub(r"\s+", " ", data)
            if self.pieces and self.pieces[-1].endswith("\n"):
                data = data.lstrip()
        if data:
            self.pieces.append(data)


def html_to_text(html: str) -> str:
    """The readable text of a page: block elements become lines, navigation is dropped."""
    parser = _Text()
    parser.feed(html)
    text = "".join(parser.pieces).replace("\u00b6", "").replace("\u00a0", " ")
    text = re.sub(r"[ \t]+\n", "\n", text)
    text = re.sub(r"^- *\n\s*(?=\S)", "- ", text, flags=re.M)
    text = re.sub(r"^(?:- ?)+(?:$|(?=- ))", "", text, flags=re.M)
    text = re.sub(r"(^- .*\n)\n+(?=- )", r"\1", text, flags=re.M)
    return re.sub(r"\n{3,}", "\n\n", text).strip() + "\n"


_ROLE = re.compile(r":[a-z0-9_:+.-]+:`[~!]?([^`<]*?)\s*(?:<[^`>]*>)?`", re.I)
_DROPPED = re.compile(
    r"^\s*\.\. (?:module|sectionauthor|moduleauthor|index|_[^:]*:|highlight|currentmodule|"
    r"versionadded|versionchanged|deprecated|toctree|include|literalinclude|testsetup|"
    r"testcleanup|audit-event|availability).*\n(?:[ \t]+:[a-z]+:.*\n)*",
    re.M,
)


def rst_to_text(rst: str) -> str:
    """reStructuredText without roles and bookkeeping directives; the rest stays as it is."""
    text = _DROPPED.sub("", rst)
    text = _ROLE.sub(r"\1", text)
    text = re.sub(
        r"^\.\. (?:function|method|class|attribute|data|exception):: *", "", text, flags=re.M
    )
    text = re.sub(r"`([^`<]*?)\s*<[^`>]*>`__?", r"\1", text).replace("``", "`")
    return re.sub(r"\n{3,}", "\n\n", text).strip() + "\n"
