"""Steps whose loss stands out: left out, named, and fatal if they stay."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from perilune.train import loop, step
from perilune.train.loop import train
from perilune.train.optim import build_optimizers
from perilune.train.run_log import CLOCKED, read_metrics
from perilune.train.spikes import ENOUGH, MOST, LossSpikeError, SpikeGuard
from perilune.train.step import DeviceBatch, Stepper, batch_loss


def guard_with(losses, sigmas=10.0):
    guard = SpikeGuard(sigmas)
    assert not any(map(guard.is_spike, losses))
    return guard


def test_what_stands_out_is_a_spike_and_is_not_remembered():
    steady = [2.0 + 0.01 * (i % 5) for i in range(ENOUGH)]
    guard = guard_with(steady)
    assert not guard.is_spike(2.1)
    remembered = list(guard.losses)
    assert guard.is_spike(2.3)
    assert list(guard.losses) == remembered
    assert not guard_with(steady, sigmas=0.0).is_spike(1e9)


def test_nothing_stands_out_of_few_losses_or_below_them():
    guard = guard_with([2.0] * (ENOUGH - 1))
    assert not guard.is_spike(9.0)
    assert not guard.is_spike(0.1)


@pytest.fixture
def spiking(tiny_run):
    """A step that has seen losses of about 1.5, where the model's is above 4."""
    config = replace(tiny_run, steps=10, spike_sigmas=10.0)
    model = loop.build_model(config)
    stepper = Stepper(model, build_optimizers(model, config.optim), config)
    batch = DeviceBatch.of(next(loop.open_loader(config)), "cpu")
    for number in range(3):
        stepper(number, batch)
    stepper.guard.losses.extend([1.5 + 0.01 * (i % 3) for i in range(200)])
    return model, stepper, batch


def test_a_spike_changes_no_weight_and_names_what_grew(spiking):
    model, stepper, batch = spiking
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    name = "model.layers.2.self_attn.o_proj.weight"
    model.get_parameter(name).register_hook(lambda grad: 50 * grad)
    result = stepper(1, batch)
    assert result.spike.startswith(f"gradient of {name}, ")
    assert all(torch.equal(p, before[n]) for n, p in model.named_parameters())
    assert all(p.grad is None for p in model.parameters())
    assert "spike" not in result.scalars()


def test_spikes_that_stay_end_the_run(spiking):
    _, stepper, batch = spiking
    for number in range(1, MOST + 1):
        assert stepper(number, batch).spike is not None
    with pytest.raises(LossSpikeError, match=f"for {MOST} steps; what grew most is the gradient"):
        stepper(MOST + 1, batch)


def test_a_run_logs_its_spike_and_resumes_to_the_same_bits(tiny_run, monkeypatch):
    """The losses before a spike are part of the state: a resumed run leaves out the same step."""
    at = ENOUGH + 2
    config = replace(tiny_run, steps=at + 3, spike_sigmas=10.0, log_every=1000, save_every=at)
    config = replace(config, rows=1, row_len=32, eval_every=0, qat_from=2.0)
    calls = []

    def poisoned(model, batch, real=batch_loss):
        calls.append(None)
        return real(model, batch) + 100.0 * (len(calls) == at + 1)

    monkeypatch.setattr(loop, "batch_loss", poisoned)
    monkeypatch.setattr(step, "batch_loss", poisoned)
    whole = replace(config, out_dir=config.out_dir + "-whole")
    train(whole)
    calls.clear()
    stops = iter([False] * (at - 1) + [True])
    assert train(config, is_stopped=lambda: next(stops)) is None
    assert train(config, resume=True) is not None
    lines = [read_metrics(Path(run.out_dir) / "metrics.jsonl") for run in (whole, config)]
    for found in lines:
        assert [m["step"] for m in found] == [at + 1, at + 3]
        assert "gradient of" in found[0]["spike"]
    one, two = ([m | dict.fromkeys((*CLOCKED, "spike")) for m in found] for found in lines)
    assert one == two
