"""One step: the guard against NaN, clipping, and what balancing counts."""

from dataclasses import replace

import pytest
import torch

from perilune.train.data import IGNORED, PADDING
from perilune.train.loop import build_model, open_loader
from perilune.train.optim import build_optimizers
from perilune.train.step import DeviceBatch, NonFiniteError, Stepper, batch_loss, moe_layers


@pytest.fixture
def setup(tiny_run):
    model = build_model(tiny_run)
    stepper = Stepper(model, build_optimizers(model, tiny_run.optim), replace(tiny_run, steps=10))
    return model, stepper, DeviceBatch.of(next(open_loader(tiny_run)), "cpu")


def weights_of(model):
    return {name: p.detach().clone() for name, p in model.named_parameters()}


def test_a_weight_that_is_not_finite_is_named(setup):
    model, stepper, batch = setup
    with torch.no_grad():
        model.model.layers[2].self_attn.o_proj.weight[0, 0] = float("nan")
    with pytest.raises(NonFiniteError, match=r"step 7: the weight model\.layers\.2\.self_attn\.o_"):
        stepper(7, batch)


def test_the_one_gradient_that_is_not_finite_is_named(setup):
    model, stepper, batch = setup
    before = weights_of(model)
    name = "model.layers.1.block_sparse_moe.experts.w2"
    model.get_parameter(name).register_hook(lambda grad: torch.full_like(grad, float("inf")))
    with pytest.raises(NonFiniteError, match=f"the gradient of {name} is not finite"):
        stepper(0, batch)
    assert all(torch.equal(p, before[n]) for n, p in model.named_parameters())


def test_a_loss_that_is_not_finite_is_told_apart(setup):
    _, stepper, batch = setup
    stepper.loss_fn = lambda model, batch: batch_loss(model, batch) * float("inf")
    with pytest.raises(NonFiniteError, match="the loss is inf, although all weights"):
        stepper(0, batch)


def test_a_layer_whose_output_is_not_finite_is_named(setup):
    """Its weights are, and so is what comes before it."""
    model, stepper, batch = setup
    before = weights_of(model)
    mla = model.model.layers[3].self_attn
    mla.scale = float("inf")
    with pytest.raises(NonFiniteError, match=r"output of model\.layers\.3\.self_attn\.o_proj"):
        stepper(0, batch)
    assert all(torch.equal(p, before[n]) for n, p in model.named_parameters())
    assert not any(module._forward_hooks for module in model.modules())


def test_the_norm_is_reported_before_clipping(setup):
    model, stepper, batch = setup
    batch_loss(model, batch).backward()
    norm = torch.stack([p.grad.norm() for p in model.parameters() if p.grad is not None]).norm()
    for p in model.parameters():
        p.grad = None
    result = stepper(0, batch)
    torch.testing.assert_close(result.grad_norm, norm)
    assert float(result.grad_norm) > stepper.config.optim.max_grad_norm


def test_balancing_counts_every_token_but_the_padding(setup):
    model, stepper, batch = setup
    segments = batch.segments_BL.clone()
    segments[:, 50:] = PADDING
    targets = batch.targets_BL.clone()
    targets[:, 49:] = IGNORED
    counted = []
    update = stepper.balancing.update

    def seen():
        counted.extend(int(b.count_EB[0].sum()) for b in stepper.balancing.balancers)
        return update()

    stepper.balancing.update = seen
    result = stepper(0, DeviceBatch(batch.inputs_BL, targets, segments))
    assert counted == [len(segments) * 50] * len(moe_layers(model))
    assert int(result.loads.dropped) == 0


def test_the_router_bias_moves_and_is_centred(setup):
    model, stepper, batch = setup
    stepper(0, batch)
    for layer in moe_layers(model):
        bias = layer.gate.e_score_correction_bias
        assert bias.abs().max() > 0
        assert abs(float(bias.mean())) < 1e-6
