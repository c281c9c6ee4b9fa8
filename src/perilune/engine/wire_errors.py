"""Exceptions that cross from one process to the other, with their class and their fields."""

from __future__ import annotations

from collections.abc import Iterator

from perilune.core.errors import EngineError, PeriluneError
from perilune.engine.wire import ErrorOnWire

_OUTSIDE: tuple[type[Exception], ...] = (ModuleNotFoundError, OSError)
"""What else a command knows how to tell: a missing extra, a file that cannot be read."""

CROSSING: tuple[type[Exception], ...] = (PeriluneError, *_OUTSIDE)


def pack(error: Exception) -> ErrorOnWire:
    """`error`, which is one of `CROSSING`."""
    kinds = tuple(kind.__name__ for kind in type(error).__mro__ if issubclass(kind, Exception))
    fields = {key: value for key, value in vars(error).items() if _is_plain(value)}
    if isinstance(error, ModuleNotFoundError):
        fields["name"] = error.name
    return ErrorOnWire(kinds, _message(error), fields)


def unpack(packed: ErrorOnWire) -> Exception:
    """The error as it was; of a class that this process does not know, its nearest known base."""
    known = {kind.__name__: kind for kind in (*_subclasses(PeriluneError), *_OUTSIDE)}
    kind: type[Exception] = next((known[k] for k in packed.kinds if k in known), EngineError)
    error = kind.__new__(kind, packed.message)  # constructors differ; what they set is in `fields`
    for key, value in packed.fields.items():
        setattr(error, key, value)
    return error


def _message(error: Exception) -> str:
    if isinstance(error, OSError) and error.filename:
        return f"{error.filename}: {error.strerror}"
    return str(error)


def _is_plain(value: object) -> bool:
    return value is None or isinstance(value, str | int | float)


def _subclasses(kind: type[Exception]) -> Iterator[type[Exception]]:
    yield kind
    for child in kind.__subclasses__():
        yield from _subclasses(child)
