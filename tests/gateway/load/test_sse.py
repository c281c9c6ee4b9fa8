"""An answer's stream into its sample, however the network cuts it."""

from __future__ import annotations

import contextlib

import pytest
from hypothesis import given
from hypothesis import strategies as st

from perilune.gateway.load.sample import OK, Sample
from perilune.gateway.load.sse import AnswerReader, BrokenStreamError, error_text
from perilune.gateway.load.workload import Block, Request

STREAM = (
    b": ping\n\n"
    b'data: {"system_fingerprint": "fp", "choices": [{"index": 0, "text": ""}]}\n\n'
    b'data: {"choices": [{"index": 0, "text": "\xc3\xa9"}], "usage": null}\r\n\r\n'
    b"event: x\nid: 7\n"
    b'data:{"choices": [{"index": 0, "text": "b", "finish_reason": null}]}\n\n'
    b'data: {"choices": [{"index": 0, "text": "", "finish_reason": "stop"}]}\n\n'
    b'data: {"choices": [], "usage": {"prompt_tokens": 7, "completion_tokens": 4,'
    b' "prompt_tokens_details": {"cached_tokens": 2}}}\n\n'
    b"data: [DONE]"
)


def new_sample() -> Sample:
    return Sample(request=Request(0.0, (Block("x", 7),), 4), due_at=10.0, sent_at=10.0)


def read(data: bytes, cuts: list[int]) -> Sample:
    """The k-th part comes at second 11 + k."""
    sample = new_sample()
    reader = AnswerReader(sample)
    at = 11.0
    for start, end in zip([0, *cuts], [*cuts, len(data)], strict=True):
        reader.feed(data[start:end], at)
        at += 1.0
    reader.end(at)
    return sample


@given(st.lists(st.integers(0, len(STREAM)), max_size=6).map(sorted))
def test_every_cut_of_a_stream_reads_alike(cuts):
    sample = read(STREAM, cuts)
    assert sample.status == OK
    assert (sample.prompt_tokens, sample.output_tokens, sample.cached_tokens) == (7, 4, 2)
    assert sample.num_pieces == 2
    assert len(sample.gaps_s) == 1
    assert sample.fingerprint == "fp"
    assert 11.0 <= sample.first_at <= sample.last_at


def test_times_are_those_at_which_the_whole_event_was_there():
    first = STREAM.index(b"event: x")
    last = STREAM.index(b'data: {"choices": []')
    sample = read(STREAM, [first - 4, first, last - 60])
    assert sample.first_at == 12.0
    assert sample.gaps_s == [1.0]
    assert sample.last_at == 14.0
    assert sample.ttft_s == 2.0
    assert sample.tpot_s == pytest.approx(2.0 / 3)


@pytest.mark.parametrize(
    "delta",
    [
        '{"content": "a"}',
        '{"reasoning_content": "a"}',
        '{"reasoning": "a"}',
        '{"tool_calls": [{}]}',
    ],
)
def test_every_kind_of_output_of_a_chat_counts(delta):
    sample = read(
        b'data: {"choices": [{"delta": {"role": "assistant", "content": ""}}]}\n\n'
        b'data: {"choices": [{"delta": %b}]}\n\n' % delta.encode(),
        [66],
    )
    assert sample.first_at == 12.0
    assert sample.status == "cut off"


def test_an_answer_without_text_has_a_first_token_when_it_finishes():
    sample = read(b'data: {"choices": [{"text": "", "finish_reason": "stop"}]}\n\n', [])
    assert sample.ttft_s == 1.0
    assert sample.num_pieces == 0
    assert sample.is_ok


def test_without_usage_pieces_count():
    sample = read(STREAM.replace(b"usage", b"other"), [])
    assert sample.num_output == 2
    assert sample.num_prompt == 7


@pytest.mark.parametrize("error", ['"it broke"', '{"message": "it broke", "code": 5}'])
def test_an_error_in_the_stream(error):
    sample = read(STREAM[:234] + b'data: {"error": %b}\n\n' % error.encode(), [])
    assert (sample.status, sample.message) == ("error in the stream", "it broke")


@pytest.mark.parametrize(
    "data",
    [
        b"data: {nonsense\n",
        b"data: \xff\xfe\n",
        b'data: {"choices": 5}\n',
        b"data: " + b"[" * 100_000 + b"\n",
        b'data: {"choices": [{"text": ' + b"[" * 50_000 + b"\n",
        b"x" * (2**22 + 1),
    ],
)
def test_what_is_no_stream(data):
    with pytest.raises(BrokenStreamError):
        read(data, [])


@given(st.binary(max_size=60))
def test_no_bytes_bring_another_error(data):
    with contextlib.suppress(BrokenStreamError):
        read(b"data: " + data, [])
    assert len(error_text(data)) <= 300


@pytest.mark.parametrize(
    ("body", "text"),
    [
        (b'{"error": {"message": "too long"}}', "too long"),
        (b'{"error": "too long"}', "too long"),
        (b'{"message": "too long"}', "too long"),
        (b"<html>Bad Gateway</html>", "<html>Bad Gateway</html>"),
        (b"{}", ""),
        (b'{"error": 5}', '{"error": 5}'),
    ],
)
def test_the_words_of_an_error(body, text):
    assert error_text(body) == text
