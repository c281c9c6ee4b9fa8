"""Whatever the bytes are, decoding gives a value or one readable error."""

from __future__ import annotations

import json

import msgspec
from hypothesis import given, settings
from hypothesis import strategies as st

from perilune.gateway.errors import BodyError, error_body
from perilune.gateway.json_body import decode
from perilune.gateway.openai import parse_chat, parse_completion
from perilune.gateway.request_types import ChatBody

CHAT = msgspec.json.Decoder(ChatBody)
FIELDS = sorted(field.name for field in msgspec.structs.fields(ChatBody))
VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(st.characters(), max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(FIELDS), inner),
    max_leaves=8,
)


def check(parse, body: bytes) -> None:
    """Any other exception than BodyError fails the test by itself."""
    try:
        parse(body, "id")
        return
    except BodyError as caught:
        error = caught
    assert str(error)
    assert json.loads(error_body(error))["error"]["message"] == str(error)


@settings(max_examples=200, deadline=None)
@given(st.binary(max_size=60))
def test_any_bytes(body):
    check(parse_chat, body)
    check(parse_completion, body)


@settings(max_examples=150, deadline=None)
@given(st.dictionaries(st.sampled_from(FIELDS), VALUES))
def test_any_values_in_known_fields(fields):
    body = json.dumps({"model": "m", "messages": [{"role": "user", "content": "x"}]} | fields)
    check(parse_chat, body.encode())


@settings(max_examples=100, deadline=None)
@given(st.integers(min_value=0), st.binary(min_size=1, max_size=3))
def test_any_damage_to_a_good_body(place, junk):
    good = b'{"model":"m","messages":[{"role":"user","content":"\\u00e9"}],"seed":12}'
    place %= len(good)
    check(parse_chat, good[:place] + junk + good[place + len(junk) :])
    check(parse_chat, good[:place])


def test_a_good_body_is_read():
    body = decode(b'{"model":"m","messages":[{"role":"user","content":"hi"}]}', CHAT)
    assert body.messages[0].content == "hi"
