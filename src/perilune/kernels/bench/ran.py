"""Which implementation a call really entered."""

from __future__ import annotations

import inspect
import sys
import threading
from collections.abc import Callable
from types import CodeType, FrameType
from typing import Any


def code_of(function: Callable[..., Any]) -> CodeType | None:
    """Of the Python function behind decorators; None for what is not written in Python."""
    inner = getattr(function, "_torchdynamo_orig_callable", function)
    return getattr(inspect.unwrap(inner), "__code__", None)


def entered(call: Callable[[], object], codes: set[CodeType]) -> set[CodeType]:
    """Those of `codes` that ran during `call`, in this thread or in one that it started."""
    seen: set[CodeType] = set()

    def notice(frame: FrameType, event: str, arg: Any) -> None:
        if event == "call" and frame.f_code in codes:
            seen.add(frame.f_code)

    before = sys.getprofile()
    threading.setprofile(notice)
    sys.setprofile(notice)
    try:
        call()
    finally:
        sys.setprofile(before)
        threading.setprofile(before)
    return seen
