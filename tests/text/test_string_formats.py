"""Expressions of `format`: what they accept is what the format means."""

from __future__ import annotations

import datetime
import ipaddress
import re
import uuid

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from perilune.text.schema_keywords import FORMATS as NAMES
from perilune.text.string_formats import FORMATS

READERS = {
    "date": datetime.date.fromisoformat,
    "time": datetime.time.fromisoformat,
    "date-time": datetime.datetime.fromisoformat,
    "ipv4": ipaddress.IPv4Address,
    "ipv6": ipaddress.IPv6Address,
    "uuid": uuid.UUID,
}


def test_every_format_that_is_kept_has_an_expression():
    assert FORMATS.keys() == NAMES


@pytest.mark.parametrize("name", READERS)
def test_whatever_matches_can_be_read(name):
    @settings(max_examples=60)
    @given(st.from_regex(FORMATS[name], fullmatch=True))
    def check(text: str) -> None:
        if text.startswith("0000-") or re.search(r"\.\d{7,}", text):
            return  # a year and a precision that Python's dates do not have
        READERS[name](text)

    check()


@pytest.mark.parametrize(
    ("name", "good", "bad"),
    [
        ("date", ["2026-02-28", "1999-12-31"], ["2026-02-30", "2026-13-01", "26-01-01", ""]),
        ("time", ["00:00:00Z", "23:59:59.5+01:30"], ["24:00:00Z", "12:00Z", "12:00:00"]),
        ("date-time", ["2026-01-31T12:00:00Z"], ["2026-01-31 12:00:00Z", "2026-01-31"]),
        ("duration", ["P1Y2M3DT4H5M6S", "PT5M", "P2W", "P1D"], ["P", "PT", "P1YT", "5M"]),
        ("email", ["a.b+c@example.org"], ["a@", "@b.c", "a b@c.de", ".a@b.c", "a..b@c.d"]),
        ("hostname", ["a", "example.org", "x-1.y"], ["-a", "a-", "a..b", "a_b", ""]),
        ("ipv4", ["0.0.0.0", "255.10.99.1"], ["256.1.1.1", "1.1.1", "01.1.1.1"]),
        ("ipv6", ["::", "::1", "1::", "fe80::1:2", "1:2:3:4:5:6:7:8"], [":", "1:2", "1::2::3"]),
        ("uuid", ["123e4567-e89b-12d3-a456-426614174000"], ["123e4567e89b12d3a456426614174000"]),
        ("uri", ["https://example.org/a?b=c#d", "x://y"], ["example.org", "http://", "http:// a"]),
    ],
)
def test_examples(name, good, bad):
    assert all(re.fullmatch(FORMATS[name], text) for text in good)
    assert not any(re.fullmatch(FORMATS[name], text) for text in bad)
