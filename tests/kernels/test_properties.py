"""Every op has every property, on the cpu tier; a fixed seed here, a new one at each command."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from perilune.kernels.registry import OPS, load_attr, spec
from perilune.kernels.testing import check_properties
from perilune.kernels.traits import Traits

TRUTHS: dict[Any, Any] = {}


@pytest.mark.parametrize("op", OPS)
def test_every_implementation_has_every_property(op):
    results = list(check_properties(spec(op), drawn=3, tier="cpu", truths=TRUTHS))
    assert results
    assert [r for r in results if not r.passed] == []


@pytest.mark.parametrize("op", OPS)
def test_traits_name_inputs_that_there_are(op):
    traits: Traits = load_attr(spec(op).traits)
    inputs = traits.make(torch.Generator(), torch.float32, (3, 2), traits.widths[0])
    named = [*traits.tokens, *traits.sequences, *traits.state_outputs, *traits.written]
    named += [*traits.scaled, *filter(None, (traits.packing, traits.slots))]
    assert set(named) <= set(inputs)
    assert set(traits.serves) <= {"cpu", "cuda"}
    assert traits.slowest in {"", *traits.regimes}
