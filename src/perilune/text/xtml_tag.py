"""One XTML tag while it comes in: the text between `<|open|>` or `<|close|>` and `<|sep|>`."""

from __future__ import annotations

import re
from typing import NamedTuple

from perilune.core.types import TextLogprob
from perilune.text.detokenizer import Utf8Stream
from perilune.text.xtml_markup import unescape

_NAMES = ("message", "think", "response", "tools", "call", "argument", "json")
_MAX_TAG_CHARS = 4096

_KEY = r"[a-z][a-z0-9_-]*"
_ATTRIBUTE = re.compile(rf' ({_KEY})="([^"]*)"')
_WHOLE = re.compile(rf'([a-z]+)((?: {_KEY}="[^"]*")*)')
_BEGINNING = re.compile(
    rf'(?:message|call|argument|json)(?: {_KEY}="[^"]*")*(?: (?:{_KEY}(?:=(?:"[^"]*)?)?)?)?'
)


class Tag(NamedTuple):
    name: str
    closing: bool
    attributes: dict[str, str] | None
    """None if they are not well formed."""
    text: str
    """All that stood between the control tokens."""


class TagToken(NamedTuple):
    data: bytes
    logprob: TextLogprob | None


class TagReader:
    """Collects a tag, and says as soon as it cannot be one.

    A weak model may write a control token and go on with prose; the prose must not wait for a
    `<|sep|>` that never comes. Among calls there is no prose: there a call or an argument with
    odd attributes is still read to its end, so that it does not show as text.
    """

    def __init__(self, *, closing: bool, among_calls: bool) -> None:
        self.closing = closing
        self._among_calls = among_calls
        self.tokens: list[TagToken] = []
        self.text = ""
        self._stream = Utf8Stream()

    def push(self, data: bytes, logprob: TextLogprob | None) -> bool:
        """Takes one token; False if what is here now begins no tag."""
        self.tokens.append(TagToken(data, logprob))
        self.text += self._stream.push(data)
        if len(self.text) > _MAX_TAG_CHARS:
            return False
        if any(name.startswith(self.text) for name in _NAMES):
            return True
        if self._among_calls and self.text.startswith(("call ", "argument ")):
            return True
        return not self.closing and _BEGINNING.fullmatch(self.text) is not None

    def finish(self) -> Tag | None:
        """The tag, at its `<|sep|>`; None if its name is none of XTML's."""
        text = self.text + self._stream.flush()
        name = text.split(" ", 1)[0]
        if name not in _NAMES:
            return None
        whole = _WHOLE.fullmatch(text)
        if whole is None:
            return Tag(name, self.closing, None, text)
        attributes = {key: unescape(value) for key, value in _ATTRIBUTE.findall(whole[2])}
        return Tag(name, self.closing, attributes, text)
