"""Door to `Packing` for rooms above the model."""

from perilune.kernels.common.packing import Packing

__all__ = ["Packing"]
