"""Functions that return a whole `TrainConfig`, by name."""

from __future__ import annotations

RECIPES: dict[str, str] = {
    "nano": "perilune.train.recipes.nano:nano",
    "nano-toy": "perilune.train.recipes.nano:nano_toy",
}
