"""What balancing counts in a step, and the rules that read it."""

import math
from dataclasses import replace

import pytest
import torch
from torch.utils.checkpoint import checkpoint

from perilune.core.errors import ConfigError
from perilune.kernels.registry import resolve
from perilune.model.moe import MoE
from perilune.model.parse_config import parse_config
from perilune.model.presets import tiny_k3
from perilune.train.balance.balancing import Balancing
from perilune.train.balance.loads import load_stats
from perilune.train.balance.penalty import auxiliary_loss
from perilune.train.balance.rules import RULES
from perilune.train.config import BALANCE_RULES, BalanceConfig
from perilune.train.loop import build_model, open_loader
from perilune.train.optim import build_optimizers
from perilune.train.override import override
from perilune.train.step import DeviceBatch, Stepper, moe_layers


def layer(seed=0):
    """One mixture in training, with weights; 8 experts, 3 a token."""
    config = parse_config(tiny_k3())
    moe = MoE(config, config.moe)
    generator = torch.Generator().manual_seed(seed)
    for p in moe.parameters():
        torch.nn.init.normal_(p, std=0.3, generator=generator)
    return moe.train()


def tokens(count, seed=1, width=64):
    return torch.randn(count, width, generator=torch.Generator().manual_seed(seed))


ALL = torch.ones(60, dtype=torch.bool)


def balanced(rule, **options):
    moe = layer()
    return moe, Balancing([moe], BalanceConfig(rule=rule, **options))


def loads_of(moe, x):
    """Without balancing's own count."""
    expert_TR = moe.gate(x).expert_TR
    return torch.bincount(expert_TR.flatten(), minlength=moe.gate.moe.num_experts)


@pytest.mark.parametrize("rule", BALANCE_RULES)
def test_loads_are_those_of_the_choice(rule):
    moe, balancing = balanced(rule)
    loads = loads_of(moe, tokens(60))
    with balancing.counting(ALL):
        moe(tokens(60))
    assert torch.equal(balancing.balancers[0].load_E.long(), loads)
    stats = balancing.update()
    shares = loads.double() / loads.sum()
    assert float(stats.max_violation) == pytest.approx(float(shares.max() * 8 - 1))
    entropy = -sum(share * math.log(share) for share in shares.tolist() if share)
    assert float(stats.load_entropy) == pytest.approx(entropy / math.log(8))
    assert int(stats.dropped) == 0


@pytest.mark.parametrize("rule", BALANCE_RULES)
def test_padding_is_not_counted(rule):
    alone, padded = balanced(rule), balanced(rule)
    with alone[1].counting(ALL):
        alone[0](tokens(60))
    with padded[1].counting(torch.arange(100) < 60):
        padded[0](torch.cat([tokens(60), 5 * tokens(40, seed=2)]))
    assert alone[1].update() == padded[1].update()
    bias = [moe.gate.e_score_correction_bias for moe, _ in (alone, padded)]
    assert torch.equal(*bias)


@pytest.mark.parametrize("rule", BALANCE_RULES)
def test_micro_batches_add_up(rule):
    whole, parts = balanced(rule), balanced(rule)
    with whole[1].counting(ALL):
        whole[0](tokens(60))
    for part in tokens(60).split(13):
        with parts[1].counting(torch.ones(len(part), dtype=torch.bool)):
            parts[0](part)
    assert whole[1].update() == parts[1].update()
    assert torch.equal(whole[0].gate.e_score_correction_bias, parts[0].gate.e_score_correction_bias)


@pytest.mark.parametrize("rule", BALANCE_RULES)
@pytest.mark.parametrize("use_reentrant", [False, True])
def test_what_backward_computes_again_is_not_counted_again(rule, use_reentrant):
    """And the gradient of activation checkpointing is that without it, the penalty's included."""
    grads, stats = [], []
    for recompute in (False, True):
        moe, balancing = balanced(rule, auxiliary_weight=3.0)
        runs = []
        moe.gate.register_forward_hook(lambda *_, runs=runs: runs.append(1))
        x = tokens(60).requires_grad_()
        with balancing.counting(ALL):
            y = checkpoint(moe, x, use_reentrant=use_reentrant) if recompute else moe(x)
        y.square().sum().backward()
        assert len(runs) == 1 + recompute
        grads.append({name: p.grad for name, p in moe.named_parameters()} | {"x": x.grad})
        stats.append(balancing.update())
    assert stats[0] == stats[1]
    for name, grad in grads[0].items():
        torch.testing.assert_close(grads[1][name], grad, msg=name)


# Of torch's own tracing of autograd functions.
@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")
@pytest.mark.parametrize("rule", ["quantile", "auxiliary"])
def test_a_compiled_router_counts_and_penalises_alike(rule):
    found = []
    for is_compiled in (False, True):
        moe, balancing = balanced(rule, auxiliary_weight=3.0)
        gate = moe.gate
        gate(tokens(1))  # ops import their backend in their first call
        if is_compiled:
            gate = torch.compile(gate, backend="aot_eager", dynamic=False, fullgraph=True)
        for _ in range(2):
            with balancing.counting(torch.arange(60) % 4 > 0):
                weight_TR = gate(tokens(60)).weight_TR
            weight_TR.square().sum().backward()
        found.append((balancing.update(), moe.gate.weight.grad))
    torch.compiler.reset()
    assert found[0][0] == found[1][0]
    torch.testing.assert_close(found[0][1], found[1][1])


def test_evaluation_and_what_is_outside_of_a_step_are_not_counted():
    moe, balancing = balanced("quantile")
    before = moe.gate.e_score_correction_bias.clone()
    moe(tokens(60))
    moe.eval()
    moe(tokens(60))
    stats = balancing.update()
    assert torch.equal(moe.gate.e_score_correction_bias, before)
    assert [float(value) for value in stats] == [0, 1, 0]


def test_the_bias_moves_with_the_update_and_the_counts_start_afresh():
    moe, balancing = balanced("quantile")
    bias = moe.gate.e_score_correction_bias
    first = loads_of(moe, tokens(60))
    for _ in range(2):
        with balancing.counting(ALL):
            assert torch.equal(loads_of(moe, tokens(60)), first)
    assert (bias == 0).all()
    balancing.update()
    assert bias.abs().max() > 0
    assert not torch.equal(loads_of(moe, tokens(60)), first)
    with balancing.counting(ALL):
        moe(tokens(60))
    counted = balancing.balancers[0]
    assert counted.load_E.sum() == 60 * 3
    assert (counted.count_EB.sum(1) == 60).all()
    assert int(balancing.update().dropped) == 0


def test_the_sign_rule_takes_one_step_against_the_load():
    moe, balancing = balanced("sign", sign_rate=0.01)
    loads = loads_of(moe, tokens(60)).double()
    for expected in (1, 2):
        with balancing.counting(ALL):
            moe(tokens(60))
        balancing.update()
        if expected == 1:
            bias = moe.gate.e_score_correction_bias
            wanted = 0.01 * torch.sign(60 * 3 / 8 - loads)
            torch.testing.assert_close(bias.double(), wanted)
    assert bias.abs().max() <= 0.02 + 1e-9


@pytest.mark.parametrize("rule", ["auxiliary", "none"])
def test_other_rules_leave_the_bias_alone(rule):
    moe, balancing = balanced(rule)
    with balancing.counting(ALL):
        moe(tokens(60))
    balancing.update()
    assert (moe.gate.e_score_correction_bias == 0).all()


def slow_auxiliary_loss(logits_TE, num_active, is_counted):
    """Token by token, from the equations."""
    tokens, experts = [t for t in range(len(logits_TE)) if is_counted[t]], logits_TE.shape[1]
    f, p = [0.0] * experts, [0.0] * experts
    for t in tokens:
        scores = [1 / (1 + math.exp(-float(logit))) for logit in logits_TE[t]]
        for e in sorted(range(experts), key=lambda e: -scores[e])[:num_active]:
            f[e] += experts / (num_active * len(tokens))
        for e in range(experts):
            p[e] += scores[e] / sum(scores) / len(tokens)
    return sum(a * b for a, b in zip(f, p, strict=True))


def test_auxiliary_loss_follows_its_equations():
    logits = 2 * torch.randn(20, 6, generator=torch.Generator().manual_seed(2), dtype=torch.double)
    is_counted = torch.arange(20) % 3 > 0
    expert_TR = logits.topk(2).indices
    found = float(auxiliary_loss(logits, expert_TR, is_counted))
    assert found == pytest.approx(slow_auxiliary_loss(logits, 2, is_counted), rel=1e-6)
    assert float(auxiliary_loss(torch.zeros(8, 4), torch.arange(8)[:, None] % 4, None)) == 1


def test_penalty_is_a_term_of_the_loss():
    """Its gradient, times its weight and the share of the micro-batch, is added to the router's."""
    grads = {}
    for weight in (0.0, 0.5):
        moe, balancing = balanced("auxiliary", auxiliary_weight=weight)
        with balancing.counting(ALL, share=0.25):
            moe(tokens(60)).square().mean().backward()
        grads[weight] = moe.gate.weight.grad
    moe = layer()
    logits_TE = resolve("scores")(tokens(60), moe.gate.weight)
    loss = auxiliary_loss(logits_TE, moe.gate(tokens(60)).expert_TR, None)
    (expected,) = torch.autograd.grad(0.5 * 0.25 * loss, moe.gate.weight)
    assert expected.abs().max() > 1e-6
    torch.testing.assert_close(grads[0.5] - grads[0.0], expected, rtol=1e-3, atol=1e-7)


def test_the_auxiliary_loss_balances_what_trains_on_it():
    moe, balancing = balanced("auxiliary", auxiliary_weight=1.0)
    optimizer = torch.optim.Adam([moe.gate.weight], lr=0.02)
    violations = []
    for step in range(40):
        with balancing.counting(ALL.repeat(8)):
            y = moe(tokens(480, seed=step) + 0.5)  # which all experts see alike
        (0 * y).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        violations.append(float(balancing.update().max_violation))
    assert violations[0] > 1
    assert max(violations[-5:]) < 0.5


def test_statistics_are_of_the_worst_layer():
    load_LE = torch.tensor([[5, 5, 5, 5], [10, 10, 0, 0]])
    stats = load_stats(load_LE, torch.tensor([20]))
    assert float(stats.max_violation) == 1
    assert float(stats.load_entropy) == pytest.approx(0.5)
    assert int(load_stats(load_LE, torch.tensor([21])).dropped) == 2


def test_nothing_is_balanced_where_all_experts_answer(tiny_run):
    experts = tiny_run.model["text_config"]["num_experts"]
    config = override(tiny_run, f"model.text_config.num_experts_per_token={experts}")
    model = build_model(config)
    stepper = Stepper(model, build_optimizers(model, config.optim), replace(config, steps=10))
    result = stepper(0, DeviceBatch.of(next(open_loader(config)), "cpu"))
    assert float(result.loss) > 0
    assert float(result.loads.max_violation) == 0
    assert all((layer.gate.e_score_correction_bias == 0).all() for layer in moe_layers(model))


def test_every_rule_that_a_recipe_can_name_exists():
    assert tuple(RULES) == BALANCE_RULES


@pytest.mark.parametrize(
    ("options", "message"),
    [({"rule": "quantiles"}, "there is: quantile, sign"), ({"bins": 1}, "balance.bins is 1")],
)
def test_wrong_settings_are_refused(options, message):
    with pytest.raises(ConfigError, match=message):
        BalanceConfig(**options)
