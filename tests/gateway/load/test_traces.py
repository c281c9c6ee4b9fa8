"""Traces from files: both formats, and what is wrong with a hostile one, by line."""

from __future__ import annotations

import gzip
import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from perilune.gateway.load import traces
from perilune.gateway.load.errors import TraceError
from perilune.gateway.load.traces import TracedRequest, read_trace

HEADER = "TIMESTAMP,ContextTokens,GeneratedTokens"
FIRST = "2023-11-16 18:17:03.9799600,4808,10"
MOONCAKE = {"timestamp": 27, "input_length": 1000, "output_length": 5, "hash_ids": [0, 7]}


def mooncake(**fields) -> str:
    return json.dumps(MOONCAKE | fields)


@pytest.fixture
def file(tmp_path):
    path = tmp_path / "trace"

    def write(*lines: str | bytes, end: bytes = b"\n"):
        parts = [line if isinstance(line, bytes) else line.encode() for line in lines]
        path.write_bytes(end.join(parts))
        return path

    return write


def test_azure_rows(file):
    path = file(HEADER, FIRST, "2023-11-16 18:17:04.0319600,3180,8", end=b"\r\n")
    first, second = read_trace(path)
    assert first == TracedRequest(0.0, 4808, 10)
    assert second[1:] == (3180, 8, ())
    assert second.arrival_s == pytest.approx(0.052)


def test_azure_columns_may_stand_elsewhere_and_time_may_have_a_zone(file):
    path = file(
        "\ufeffGeneratedTokens,Other,ContextTokens,TIMESTAMP",
        "10,x,5,2024-05-10 00:00:00.009930+00:00",
        '1,"a,b",6,2024-05-10 02:00:01.009930+02:00',
    )
    assert list(read_trace(path)) == [TracedRequest(0.0, 5, 10), TracedRequest(1.0, 6, 1)]


def test_mooncake_lines(file):
    path = file(mooncake(), "", mooncake(timestamp=3027, hash_ids=[0, 8], more="x"), "")
    first, second = read_trace(path)
    assert first == TracedRequest(0.0, 1000, 5, (0, 7))
    assert second == TracedRequest(3.0, 1000, 5, (0, 8))


def test_a_gzipped_trace(file, tmp_path):
    (tmp_path / "packed").write_bytes(gzip.compress(mooncake().encode()))
    assert list(read_trace(tmp_path / "packed")) == list(read_trace(file(mooncake())))


def test_only_as_much_is_read_as_is_asked_for(file):
    assert next(read_trace(file(mooncake(), "{"))).prompt_tokens == 1000


@pytest.mark.parametrize(
    ("lines", "says"),
    [
        ([mooncake(), '{"timestamp": 1'], r"line 2: .*truncated"),
        ([mooncake(), mooncake(), "nonsense"], r"line 3: "),
        ([mooncake(timestamp=-1)], r"line 1: .*>= 0.*timestamp"),
        ([mooncake(timestamp=1e300)], r"line 1: .*timestamp"),
        ([mooncake().replace("27", "1e999")], r"line 1: "),
        ([mooncake().replace("27", "NaN")], r"line 1: "),
        ([mooncake(input_length=10**30)], r"line 1: .*input_length"),
        ([mooncake(input_length=2**40)], r"line 1: .*input_length"),
        ([mooncake(input_length=0, hash_ids=[])], r"line 1: .*input_length"),
        ([mooncake(input_length=True)], r"line 1: .*input_length"),
        ([mooncake(output_length="9")], r"line 1: .*output_length"),
        ([mooncake(hash_ids=[0])], r"line 1: 1000 tokens are 2 blocks.* 1 hash_ids"),
        ([mooncake(hash_ids=[0, -1])], r"line 1: .*hash_ids"),
        (['{"timestamp": 0}'], r"line 1: .*missing.*input_length"),
        ([mooncake(timestamp=3000), mooncake(timestamp=2000)], r"line 2: 1 s before"),
        ([mooncake(), b'{"timestamp": \xff'], r"line 2: "),
        (["[" * 100_000], r"line 1: no column TIMESTAMP"),
        ([mooncake(), "{" + '"a":' + "[" * 50_000], r"line 2: "),
        (["a,b", "1,2"], r"line 1: no column TIMESTAMP, ContextTokens, GeneratedTokens"),
        ([HEADER.replace("Generated", ""), FIRST], r"line 1: no column GeneratedTokens;"),
        ([b"\x00\xff\xfe", "x"], r"line 1: neither a CSV header nor JSON"),
        ([HEADER, FIRST, "2023-11-16 18:17:04,5"], r"line 3: 2 columns, and the header has 3"),
        ([HEADER, "yesterday,5,5"], r"line 2: .*yesterday"),
        ([HEADER, FIRST.replace("4808", "-4")], r"line 2: ContextTokens is '-4'"),
        ([HEADER, FIRST.replace("4808", "4e3")], r"line 2: ContextTokens is '4e3'"),
        ([HEADER, FIRST.replace("4808", "9" * 5000)], r"line 2: ContextTokens is '9{40}'"),
        ([HEADER, FIRST.replace("4808", "99999999999")], r"line 2: .*outside 1\.\.16777216"),
        ([HEADER, FIRST.replace("4808", "0")], r"line 2: .*outside 1"),
        ([HEADER, FIRST, FIRST.replace("18:17", "18:16")], r"line 3: 60 s before"),
        ([HEADER, FIRST, FIRST.replace("2023", "9999")], r"line 3: more than ten years"),
        ([HEADER, FIRST.encode() + b"\xff"], r"line 2: "),
        ([HEADER], "holds no request"),
        ([""], "is empty"),
        ([HEADER, b"x" * (2**20 + 1)], r"line 2: longer than 1048576 bytes"),
    ],
)
def test_a_wrong_trace_is_one_clear_error(file, lines, says):
    path = file(*lines)
    with pytest.raises(TraceError, match=says) as raised:
        list(read_trace(path))
    assert str(raised.value).startswith(str(path))
    assert len(str(raised.value)) < len(str(path)) + 400
    assert "\n" not in str(raised.value)


@pytest.mark.parametrize("damage", [lambda data: data[:-12], lambda data: data[:20] + b"\x00" * 9])
def test_damaged_gzip_data(tmp_path, damage):
    whole = gzip.compress("\n".join(mooncake(timestamp=t) for t in range(100, 2000)).encode())
    (tmp_path / "packed").write_bytes(damage(whole))
    with pytest.raises(TraceError, match=r"line \d+: the gzip data is damaged"):
        list(read_trace(tmp_path / "packed"))


def test_a_file_that_is_not_there(tmp_path):
    with pytest.raises(FileNotFoundError):
        list(read_trace(tmp_path / "none"))


@given(st.binary(max_size=200))
def test_no_bytes_bring_another_error(tmp_path_factory, data):
    path = tmp_path_factory.getbasetemp() / "bytes"
    for head in (b"", HEADER.encode() + b"\n", b"{"):
        path.write_bytes(head + data)
        try:
            requests = list(read_trace(path))
        except TraceError:
            continue
        assert all(1 <= request.prompt_tokens <= traces.MAX_TOKENS for request in requests)
