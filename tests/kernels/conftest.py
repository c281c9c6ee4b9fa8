"""Triton decides when it is imported whether it compiles or interprets; here it interprets.

Modules of this folder that ops name by their path are found under their plain names, and so are
those with faults that are planted on a GPU.
"""

from __future__ import annotations

import importlib.util
import sys
import types
from pathlib import Path

import pytest

from perilune.kernels.testing import use_interpreter

use_interpreter()
HERE = ("toy_op", "toy_triton", "peer_stand_ins", "plugin_packages", "triton_faults")
ON_GPU = ("planting", "decode_faults", "products_faults", "cuda_faults")
PLACES = {name: Path(__file__).parent for name in (*HERE, "decode_programs")}
PLACES |= dict.fromkeys(ON_GPU, Path(__file__).parents[1] / "gpu")
for name, folder in PLACES.items():
    found = importlib.util.spec_from_file_location(name, folder / f"{name}.py")
    sys.modules[name] = importlib.util.module_from_spec(found)
    found.loader.exec_module(sys.modules[name])


@pytest.fixture
def kda_peers(monkeypatch):
    """fla-core and FlashKDA can be imported; their stand-ins answer."""
    stand_ins = sys.modules["peer_stand_ins"]

    def module(name, **attributes):
        made = types.ModuleType(name)
        made.__dict__.update(attributes)
        made.__spec__ = types.SimpleNamespace(name=name)
        monkeypatch.setitem(sys.modules, name, made)

    module("fla")
    module("fla.ops")
    module("fla.ops.kda", chunk_kda=stand_ins.fake_chunk_kda)
    recurrent = stand_ins.fake_fused_recurrent_kda_fwd
    module("fla.ops.kda.fused_recurrent", fused_recurrent_kda_fwd=recurrent)
    module("flash_kda", fwd=stand_ins.fake_fwd)
    stand_ins.called.clear()
