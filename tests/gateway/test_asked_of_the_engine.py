"""What a request asks of the prefix cache and of the queue, and what it is told."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator

import msgspec
import pytest
from msgspec.structs import replace

from perilune.core.fakes import FakeEngine
from perilune.core.types import CompletionRequest, Finish, TokenEvent, TokenRequest, Usage
from perilune.gateway.backends.local import LocalModel
from perilune.gateway.errors import BodyError
from perilune.gateway.openai import parse_chat, parse_completion
from perilune.gateway.usage_sum import UsageSum
from perilune.text.tiktoken_ranks import byte_level
from perilune.text.xtml_format import XtmlFormat

CHAT = {"model": "m", "messages": [{"role": "user", "content": "hi"}]}
COMPLETION = {"model": "m", "prompt": "hi", "n": 2}


class CachingEngine(FakeEngine):
    async def generate(self, request: TokenRequest) -> AsyncIterator[TokenEvent]:
        async for event in super().generate(request):
            yield replace(event, cached_tokens=1, written_tokens=5, pinned_tokens=2)


def test_an_answer_tells_what_its_request_has_read_written_and_pinned():
    engine = CachingEngine(lambda request: [ord("a")])
    request = CompletionRequest(request_id="r", model="m", prompt="abc", cache_ttl_s=60.0)

    async def finish() -> Finish:
        *_, last = [e async for e in LocalModel(engine, XtmlFormat(byte_level())).complete(request)]
        assert isinstance(last, Finish)
        return last

    usage = asyncio.run(finish()).usage
    assert engine.requests[0].pin_s == 60.0
    assert (usage.cached_tokens, usage.written_tokens, usage.pinned_tokens) == (1, 5, 2)


def test_two_choices_pin_their_prompt_once_and_write_each_an_answer():
    total = UsageSum(choices_per_prompt=2)
    total.add(0, Usage(prompt_tokens=9, written_tokens=12, pinned_tokens=8))
    total.add(1, Usage(prompt_tokens=9, cached_tokens=8, written_tokens=4, pinned_tokens=8))
    details = json.loads(msgspec.json.encode(total.body()))["prompt_tokens_details"]
    assert details == {"cached_tokens": 0, "written_tokens": 16, "pinned_tokens": 8}


@pytest.mark.parametrize(("parse", "body"), [(parse_chat, CHAT), (parse_completion, COMPLETION)])
def test_each_request_of_a_body_has_its_ttl(parse, body):
    plain = parse(json.dumps(body).encode(), "id").requests
    assert {r.cache_ttl_s for r in plain} == {None}
    pinned = parse(json.dumps(body | {"cache_ttl_s": 90}).encode(), "id").requests
    assert [r.cache_ttl_s for r in pinned] == [90] * len(plain)
    for wrong in (0, -1, 86_401, "long"):
        with pytest.raises(BodyError) as refused:
            parse(json.dumps(body | {"cache_ttl_s": wrong}).encode(), "id")
        assert refused.value.param == "cache_ttl_s"


@pytest.mark.parametrize(("parse", "body"), [(parse_chat, CHAT), (parse_completion, COMPLETION)])
def test_each_request_of_a_body_has_its_place_in_the_queue(parse, body):
    [plain, *_] = parse(json.dumps(body).encode(), "id").requests
    assert (plain.priority, plain.tenant, plain.timeout_s) == (0, "", None)
    said = {"priority": -3, "user": "anna", "timeout_s": 1.5}
    for request in parse(json.dumps(body | said).encode(), "id").requests:
        assert (request.priority, request.tenant, request.timeout_s) == (-3, "anna", 1.5)


def test_priority_and_tenant_reach_the_engine():
    engine = FakeEngine(lambda request: [ord("a")])
    request = CompletionRequest(request_id="r", model="m", prompt="a", priority=2, tenant="anna")

    async def ask() -> None:
        async for _ in LocalModel(engine, XtmlFormat(byte_level())).complete(request):
            pass

    asyncio.run(ask())
    assert (engine.requests[0].priority, engine.requests[0].tenant) == (2, "anna")
