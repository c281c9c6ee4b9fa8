"""What the package brings. Importing it must be cheap: the kernel is named, not imported."""

from perilune.kernels.plugins import Plugin

SITU = Plugin(op="situ", run="perilune_example.situ:situ_glu", devices=("cpu",))
