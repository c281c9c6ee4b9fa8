"""What `kernels bench layer` times: the model's own layers, op by op."""

from __future__ import annotations

import pytest
import torch

from perilune.kernels.bench.ceilings import Ceilings
from perilune.kernels.registry import recorded
from perilune.model.layer_bench import LayerStep, measure_layer
from perilune.model.parse_config import parse_config
from perilune.model.presets import tiny_k3
from perilune.model.stack_bench import Stack, measure_stack, peers_ops

CPU = torch.device("cpu")
CONFIG = parse_config(tiny_k3(num_hidden_layers=4))
KDA_LAYER, MLA_LAYER = (
    next(i for i in range(1, 4) if CONFIG.is_mla(i) == is_mla) for is_mla in (False, True)
)
RATES = Ceilings(1e10, 1e11)


@pytest.mark.parametrize(
    ("layer", "attention"), [(KDA_LAYER, "kda_step"), (MLA_LAYER, "mla_decode")]
)
def test_a_step_calls_the_ops_of_a_layer(layer: int, attention: str) -> None:
    step = LayerStep(CONFIG, layer, 2, 70, CPU, torch.float32)
    with recorded() as calls:
        stream = step()
    ops = [call.op for call in calls]
    assert ops.count("attn_res") == 2
    assert ops.count(attention) == ops.count("router") == ops.count("experts_mxfp4") == 1
    assert stream.update is not None
    assert torch.isfinite(stream.update).all()


def test_each_op_has_a_time_and_a_floor_and_the_layer_their_sum() -> None:
    times = measure_layer(LayerStep(CONFIG, KDA_LAYER, 2, 5, CPU, torch.float32), CPU, RATES, 0.01)
    assert {"kda_step", "experts_mxfp4"} <= {part.name for part in times.parts}
    assert times.whole.floor_s == pytest.approx(sum(part.floor_s for part in times.parts))
    for part in (times.whole, *times.parts):
        assert 0 < part.spread.p10 <= part.spread.median <= part.spread.p90
        assert part.floor_s > 0


def test_a_step_repeats() -> None:
    """What is timed again and again computes the same: lengths do not grow."""
    step = LayerStep(CONFIG, MLA_LAYER, 2, 70, CPU, torch.float32)
    first, second = step().update, step().update
    assert first is not None
    assert second is not None
    assert torch.equal(first, second)


@pytest.mark.parametrize(("factor", "low", "high"), [(1.0, 0.0, 1e-4), (2.0, 0.05, 10.0)])
def test_training_of_a_stack_tells_how_far_its_peer_is_off(
    factor: float, low: float, high: float
) -> None:
    stack = Stack(CONFIG, (KDA_LAYER, MLA_LAYER), 40, CPU, torch.float32)
    theirs = peers_ops({"linear", "mla_prefill", "attn_res"})
    attend = theirs["mla_prefill"]
    theirs["mla_prefill"] = lambda *args: factor * attend(*args)
    times = measure_stack(stack, theirs, RATES, 0.01)
    assert low <= times.difference < high
    assert times.floor_s > 0
    assert min(times.ours.median, times.peer.median) > 0
