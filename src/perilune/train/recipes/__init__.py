"""Functions that return a whole `TrainConfig`, by name."""

from __future__ import annotations

from importlib import import_module

from perilune.core.errors import ConfigError
from perilune.train.config import TrainConfig

RECIPES: dict[str, str] = {
    "nano": "perilune.train.recipes.nano:nano",
    "nano-toy": "perilune.train.recipes.nano:nano_toy",
}


def recipe(name: str) -> TrainConfig:
    """The configuration called `name`.

    Raises:
        ConfigError: no recipe has that name.
    """
    if name not in RECIPES:
        raise ConfigError(f"unknown recipe {name!r}; known: {', '.join(RECIPES)}")
    module, _, attribute = RECIPES[name].partition(":")
    return getattr(import_module(module), attribute)()
