"""JSON pointers in references of a schema (RFC 6901, as a URI fragment)."""

from __future__ import annotations

from collections.abc import Mapping
from urllib.parse import unquote

from perilune.text.schema_keywords import refuse


def resolve(root: object, pointer: str, at: str) -> object:
    """What `pointer`, which begins with '#', points at in `root`.

    Raises:
        TextError: nothing is there; `at` is the field of the reference.
    """
    value = root
    fragment = unquote(pointer.removeprefix("#"))
    if fragment and not fragment.startswith("/"):
        refuse(at, "only references by a path ('#/…') are read")
    for part in fragment.split("/")[1:]:
        key = part.replace("~1", "/").replace("~0", "~")
        if isinstance(value, Mapping) and key in value:
            value = value[key]
        elif isinstance(value, list) and key.isdecimal() and int(key) < len(value):
            value = value[int(key)]
        else:
            refuse(at, f"{pointer[:80]!r} points at nothing")
    return value
