"""A long body must not hold up the event loop, in which every stream gets on."""

from __future__ import annotations

import asyncio
import json
import threading
from dataclasses import replace

import pytest

from perilune.core.fakes import ScriptedModel
from perilune.core.types import Finish, Usage
from perilune.gateway.endpoints import CHAT, LOOP_BYTES, ModelCaller
from perilune.gateway.errors import BodyError
from perilune.gateway.json_body import SECOND_LOOK_BYTES
from perilune.gateway.openai import ChatCall, parse_chat
from perilune.gateway.router import Route, Router
from perilune.telemetry.metrics import ServerMetrics


def body_of(num_bytes: int) -> bytes:
    user = {"role": "user", "content": "x" * num_bytes}
    return json.dumps({"model": "scripted", "messages": [user]}).encode()


def test_the_event_loop_goes_on_while_a_long_body_is_read():
    loop_ran = threading.Event()

    def parse(body: bytes, call_id: str) -> ChatCall:
        assert loop_ran.wait(10), "the event loop stood still"
        return parse_chat(body, call_id)

    async def answer() -> int:
        model = ScriptedModel(lambda request: [Finish(reason="stop", usage=Usage())])
        caller = ModelCaller(Router([Route(model=model)]), ServerMetrics(), ping_interval_s=100)
        asyncio.get_running_loop().call_soon(loop_ran.set)
        endpoint = replace(CHAT, parse=parse)
        reply = await caller.answer(
            endpoint, body_of(LOOP_BYTES), None, "id", [], on_fault=pytest.fail
        )
        return reply.status

    assert asyncio.run(answer()) == 200


def test_a_long_broken_body_is_not_read_twice():
    broken = body_of(SECOND_LOOK_BYTES)[:-1]
    with pytest.raises(BodyError, match=r"not JSON, or holds a lone surrogate: .*truncated"):
        parse_chat(broken, "id")
