"""What `kernels bench layer` times: the model's own layers, op by op."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from perilune.kernels.bench import subject
from perilune.kernels.bench.ceilings import Ceilings
from perilune.kernels.bench.errors import DishonestError, RedOpError
from perilune.kernels.registry import recorded, replaced, resolve
from perilune.model import layer_bench
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


@pytest.mark.parametrize(
    ("layer", "attention"), [(KDA_LAYER, "kda_step"), (MLA_LAYER, "mla_decode")]
)
def test_each_op_has_a_time_and_a_floor_and_the_layer_their_sum(layer: int, attention: str) -> None:
    times = measure_layer(LayerStep(CONFIG, layer, 2, 5, CPU, torch.float32), CPU, RATES, 0.01)
    assert {attention, "experts_mxfp4"} <= {part.name for part in times.parts}
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


def stack_and_peer() -> tuple[Stack, dict[str, Callable[..., Any]]]:
    return Stack(CONFIG, (KDA_LAYER, MLA_LAYER), 40, CPU, torch.float32), peers_ops(
        {"linear", "mla_prefill", "attn_res"}
    )


def test_training_of_a_stack_stands_beside_the_same_mathematics() -> None:
    times = measure_stack(*stack_and_peer(), RATES, 0.01)
    assert times.difference < 1e-4
    assert times.floor_s > 0
    assert min(times.ours.median, times.peer.median) > 0


def test_a_peer_that_computes_something_else_is_refused() -> None:
    stack, theirs = stack_and_peer()
    attend = theirs["mla_prefill"]
    theirs["mla_prefill"] = lambda *args: 2 * attend(*args)
    with pytest.raises(DishonestError, match="one of both is wrong"):
        measure_stack(stack, theirs, RATES, 0.01)


def test_a_red_op_is_not_timed(monkeypatch) -> None:
    def red(op, backend):
        raise RedOpError(f"{op.name} on {backend}")

    monkeypatch.setattr(layer_bench, "_green", set())
    monkeypatch.setattr(subject, "require_green", red)
    with pytest.raises(RedOpError):
        measure_layer(LayerStep(CONFIG, KDA_LAYER, 1, 5, CPU, torch.float32), CPU, RATES, 0.01)


def test_an_op_inside_of_another_is_no_part_of_a_layer() -> None:
    route, norm = resolve("router"), resolve("rms_norm")
    x = torch.ones(2, 4)
    with replaced({"router": lambda x: norm(x, torch.ones(4), 1e-5)}), recorded() as calls:
        route(x)
        norm(x, torch.ones(4), 1e-5)
    assert [call.op for call in calls] == ["router", "rms_norm"]
