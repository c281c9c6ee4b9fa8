"""`--set a.b=c`: one value of a configuration replaced, by its path."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import fields, is_dataclass, replace
from typing import Any, TypeVar

from perilune.core.errors import ConfigError

Config = TypeVar("Config")


def override(config: Config, setting: str) -> Config:
    """`config` (a frozen dataclass) with `setting`, "path.to.key=value"; values are read as JSON,
    else as text.

    Raises:
        ConfigError: no "=", an unknown key, or a value of another type than the present one.
    """
    path, equals, text = setting.partition("=")
    if not equals:
        raise ConfigError(f"--set {setting}: expected KEY=VALUE")
    return _replaced(config, path.split("."), text, setting)


def _replaced(node: Any, path: list[str], text: str, setting: str) -> Any:
    if not path:
        return _value(text, node, setting)
    children = _children(node)
    if path[0] not in children:
        known = ", ".join(map(str, children)) or "nothing inside"
        raise ConfigError(f"--set {setting}: unknown key {path[0]!r} (there is: {known})")
    child = _replaced(children[path[0]], path[1:], text, setting)
    if isinstance(node, Mapping):
        return {**node, path[0]: child}
    return replace(node, **{path[0]: child})


def _children(node: Any) -> Mapping[str, Any]:
    if isinstance(node, Mapping):
        return node
    if is_dataclass(node):
        return {field.name: getattr(node, field.name) for field in fields(node)}
    return {}


def _value(text: str, present: Any, setting: str) -> Any:
    try:
        value = json.loads(text)
    except ValueError:
        value = text
    if isinstance(present, str):
        return text
    if isinstance(present, tuple) and isinstance(value, list):
        return tuple(value)
    if isinstance(present, float) and type(value) is int:
        return float(value)
    if present is not None and type(value) is not type(present):
        raise ConfigError(f"--set {setting}: expected a value like {present!r}")
    return value
