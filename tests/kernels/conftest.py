"""Triton decides when it is imported whether it compiles or interprets; here it interprets.

Modules of this folder that ops name by their path are found under their plain names.
"""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path

from perilune.kernels.testing import use_interpreter

use_interpreter()
for name in ("toy_op", "toy_triton"):
    found = importlib.util.spec_from_file_location(name, Path(__file__).with_name(f"{name}.py"))
    sys.modules[name] = importlib.util.module_from_spec(found)
    found.loader.exec_module(sys.modules[name])
