"""perilune: the open, complete stack for models of the Kimi K3 kind."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from perilune.model.api import LanguageModel

__version__ = "0.1.0.dev0"
__all__ = ["__version__", "load_model"]


def load_model(directory: str, device: str = "cpu", dtype: str = "float32") -> LanguageModel:
    """Loads a checkpoint directory; see `perilune.model.api.load_model`."""
    # Imported here so that `import perilune` stays free of torch for the control plane.
    from perilune.model.api import load_model as load

    return load(directory, device=device, dtype=dtype)
