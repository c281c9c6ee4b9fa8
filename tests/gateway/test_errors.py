"""Every error of the package has a line in the table from errors to HTTP."""

from __future__ import annotations

import importlib
import json
import pkgutil

import pytest

import perilune
from perilune.core.errors import EngineError, OverloadedError, PeriluneError, RequestError
from perilune.gateway.errors import (
    INTERNAL,
    MethodNotAllowedError,
    error_reply,
    fault_of,
)

TYPES = {"invalid_request_error", "not_found_error", "rate_limit_error", "server_error"}


def all_error_classes() -> list[type[PeriluneError]]:
    """Those of core and of every room's `errors` module."""
    for module in pkgutil.walk_packages(perilune.__path__, "perilune."):
        if module.name.endswith(".errors"):
            importlib.import_module(module.name)
    found, waiting = [], [PeriluneError]
    while waiting:
        error = waiting.pop()
        found.append(error)
        waiting += error.__subclasses__()
    return [error for error in found if error is not PeriluneError]


def instance_of(error: type[PeriluneError]) -> PeriluneError:
    """Skips the constructor, whose arguments differ: the table looks at the class."""
    instance = error.__new__(error)
    instance.args = ("what is wrong",)
    return instance


@pytest.mark.parametrize("error", all_error_classes(), ids=lambda error: error.__name__)
def test_every_error_is_mapped(error):
    fault = fault_of(instance_of(error))
    assert fault is not INTERNAL
    assert 400 <= fault.status <= 599
    assert fault.type in TYPES
    assert (fault.type == "server_error") == (fault.status >= 500)


def test_an_unmapped_error_is_found():
    class Stray(PeriluneError):
        """Derives from the root alone."""

    assert fault_of(Stray("x")) is INTERNAL


def test_the_body_has_the_four_fields():
    body = json.loads(error_reply(RequestError("bad n", param="n", code="c")).body)
    assert body == {
        "error": {"message": "bad n", "type": "invalid_request_error", "param": "n", "code": "c"}
    }


def test_headers_that_go_with_an_error():
    overloaded = error_reply(OverloadedError("full", retry_after_s=0.2))
    assert ("retry-after", "1") in overloaded.headers
    restarting = EngineError("soon")
    restarting.retry_after_s = 3.2
    assert ("retry-after", "4") in error_reply(restarting).headers
    assert "retry-after" not in dict(error_reply(EngineError("broken")).headers)
    assert ("allow", "GET") in error_reply(MethodNotAllowedError("no", allowed="GET")).headers


def test_the_text_of_an_internal_error_stays_inside():
    reply = error_reply(ValueError("secret"))
    assert reply.status == 500
    assert b"secret" not in reply.body
