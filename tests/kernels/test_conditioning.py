"""What an ill-conditioned result in half precision may be off by."""

from __future__ import annotations

import torch

from perilune.kernels.testing.conditioning import conditioned, movement
from perilune.kernels.testing.result import Finding


def dot(x_D, y_D):
    return (x_D * y_D).sum()


def opposed(dtype):
    """Two vectors whose product cancels to a hundredth of its terms."""
    x_D = torch.cat([torch.ones(64), -torch.ones(64)]).to(dtype)
    y_D = torch.ones(128).to(dtype)
    y_D[0] = 2
    return {"x_D": x_D, "y_D": y_D}


def truth(inputs):
    return {"output 0": dot(**{name: x.double() for name, x in inputs.items()})}


def judged(findings, dtype, inputs):
    asked = []

    def oracle(**given):
        asked.append(1)
        return dot(**given)

    found = list(conditioned(findings, dtype, oracle, inputs, truth(inputs), grad=False))
    return found, len(asked)


def test_a_product_that_cancels_may_be_off_by_what_its_inputs_round():
    inputs = opposed(torch.bfloat16)
    moved = movement(torch.bfloat16, dot, inputs, truth(inputs), grad=False)["output 0"]
    # 128 terms, each moved by two inputs, uniformly by up to half of 2^-7: sqrt(256 / 12) 2^-7.
    assert 0.5 < moved / ((256 / 12) ** 0.5 * 2**-7) < 2
    given = [Finding("inference output 0", 2 * moved, 0.01), Finding("output 0", 4 * moved, 0.01)]
    (passed, failed), _ = judged(given, torch.bfloat16, inputs)
    assert passed.error <= passed.bound
    assert failed.error > failed.bound


def test_the_oracle_is_asked_for_none_that_is_within_its_bound_and_for_no_fp32():
    inputs = opposed(torch.bfloat16)
    within, wide = Finding("output 0", 0.005, 0.01), Finding("output 0", 0.5, 0.01)
    assert judged([within], torch.bfloat16, inputs) == ([within], 0)
    assert judged([wide], torch.float32, opposed(torch.float32)) == ([wide], 0)


def test_a_well_conditioned_result_is_granted_next_to_nothing():
    inputs = {"x_D": torch.ones(128).bfloat16(), "y_D": torch.ones(128).bfloat16()}
    wrong = Finding("output 0", 0.02, 0.01)
    (found,), asked = judged([wrong], torch.bfloat16, inputs)
    assert asked
    assert found == wrong
