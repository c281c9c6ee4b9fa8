"""XTML, K3's markup: elements as segments, each attribute piece a segment of its own.

The pieces are encoded apart, which fixes where tokens begin; only control tokens are markup.
"""

from __future__ import annotations

from perilune.text.k3_names import CLOSE, END_OF_MSG, OPEN, SEP
from perilune.text.tokenizer import Segment

Attributes = tuple[tuple[str, str], ...]


def open_tag(tag: str, attributes: Attributes = (), *, trained: bool = False) -> list[Segment]:
    segments = [Segment(OPEN, True, trained), Segment(tag, False, trained)]
    for key, value in attributes:
        segments.append(Segment(f" {key}", False, trained))
        segments.append(Segment('="', False, trained))
        segments += text_segment(escape(value), trained=trained)
        segments.append(Segment('"', False, trained))
    segments.append(Segment(SEP, True, trained))
    return segments


def close_tag(tag: str, *, trained: bool = False) -> list[Segment]:
    return [
        Segment(CLOSE, True, trained),
        Segment(tag, False, trained),
        Segment(SEP, True, trained),
    ]


def end_message(*, trained: bool = False) -> list[Segment]:
    return [*close_tag("message", trained=trained), Segment(END_OF_MSG, True, trained)]


def text_segment(text: str, *, trained: bool = False) -> list[Segment]:
    """Ordinary text; an empty string makes no segment."""
    return [Segment(text, False, trained)] if text else []


def system_message(kind: str, body: str) -> list[Segment]:
    """A message that the format itself writes: role system, with a type."""
    return [
        *open_tag("message", (("role", "system"), ("type", kind))),
        *text_segment(body),
        *end_message(),
    ]


def escape(value: str) -> str:
    """An attribute value: the ampersand first, then the quote, nothing else."""
    return value.replace("&", "&amp;").replace('"', "&quot;")


def unescape(value: str) -> str:
    return value.replace("&quot;", '"').replace("&amp;", "&")
