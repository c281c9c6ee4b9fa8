"""The whole network's small promises: freezing, the weights held as bf16, heads, dtypes."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from perilune.kernels.common.few_tokens import MAX_TOKENS
from perilune.kernels.common.packing import Packing
from perilune.kernels.mla.reference import mla_decode
from perilune.model.init import init_weights, random_weights
from perilune.model.linear import Fused, Held, Linear
from perilune.model.model import Transformer
from perilune.model.moe import Experts, Router
from perilune.model.parse_config import parse_config
from perilune.model.presets import tiny_k3, tiny_kimi_linear

TOKENS = 37
FAMILIES = {"k3": tiny_k3, "kimi_linear": tiny_kimi_linear}
IDS = torch.randint(0, 128, (TOKENS,), generator=torch.Generator().manual_seed(8))


def generator(seed: int = 4) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


@pytest.fixture(params=FAMILIES)
def model(request) -> Transformer:
    return random_weights(Transformer(parse_config(FAMILIES[request.param]())), generator())


def run(model: Transformer, ids_T: Tensor = IDS) -> Tensor:
    with torch.no_grad():
        return model(ids_T, Packing.of([len(ids_T)]))


def relative(got: Tensor, want: Tensor) -> float:
    assert got.shape == want.shape
    return float((got - want).abs().max() / want.abs().max())


def test_freezing_changes_no_name_no_value_and_no_logit(model):
    before = {name: value.clone() for name, value in model.state_dict().items()}
    want = run(model)
    assert model.freeze() is model
    after = model.state_dict()
    assert list(after) == list(before)
    assert all(torch.equal(after[name], before[name]) for name in before)
    assert not any(p.requires_grad for p in model.parameters())
    assert relative(run(model), want) < 1e-5


def test_bf16_weights_are_read_as_bf16_by_few_tokens_and_change_nothing(model):
    model = model.bfloat16().float()
    ids_T = IDS[:MAX_TOKENS]
    want = run(model, ids_T)
    model.freeze()
    held = [m.held for m in model.modules() if isinstance(m, Linear | Router) and m.held]
    assert held
    assert all(each.for_tokens(MAX_TOKENS).dtype == torch.bfloat16 for each in held)
    assert all(each.for_tokens(MAX_TOKENS + 1).dtype == torch.float32 for each in held)
    assert all(w.dtype == torch.bfloat16 for w in expert_weights(model))
    assert relative(run(model, ids_T), want) < 1e-4


def test_weights_that_bf16_would_round_are_left_alone(model):
    model.freeze()
    assert all(w.dtype == torch.float32 for w in expert_weights(model))


def expert_weights(model: Transformer) -> list[Tensor]:
    found = [w for m in model.modules() if isinstance(m, Experts) for w in m.weights(1)]
    assert found
    return found


@pytest.mark.parametrize("scale", [1e-30, 1.0, 1e30])
def test_only_what_bf16_holds_exactly_is_held(scale):
    exact = (scale * torch.randn(8, 16, generator=generator())).bfloat16().float()
    assert torch.equal(Held(exact).for_tokens(1).float(), exact)
    finer = torch.nextafter(exact, torch.full_like(exact, torch.inf))
    assert Held(finer).for_tokens(1) is finer


def test_fused_projections_equal_each_one():
    parts = [Linear(6, n) for n in (4, 1, 7)]
    for part in parts:
        torch.nn.init.normal_(part.weight, generator=generator())
    fused, x = Fused(parts), torch.randn(2, 6, generator=generator())
    want = [part(x) for part in parts]
    for _ in range(2):
        for got, single in zip(fused.split(x), want, strict=True):
            torch.testing.assert_close(got, single)
        fused.freeze()


def test_last_only_gives_the_last_token_of_each_sequence(model):
    packing = Packing.of([5, 1, 31])
    with torch.no_grad():
        every = model(IDS, packing)
        last = model(IDS, packing, last_only=True)
    assert last.shape == (3, 128)
    assert relative(last, every[[4, 5, 36]]) < 1e-5


def test_tied_embeddings_are_the_head():
    model = Transformer(parse_config(tiny_k3(tie_word_embeddings=True)))
    random_weights(model, generator())
    assert "lm_head.weight" not in model.state_dict()
    with torch.no_grad():
        before = run(model)
        hidden = model.model.norm(model.model(IDS, Packing.of([TOKENS]), None))
    torch.testing.assert_close(before, hidden @ model.model.embed_tokens.weight.T)


def test_logits_are_fp32_whatever_the_model_computes_in(model):
    want = run(model)
    model.model.compute_dtype = torch.bfloat16
    mixed = run(model)
    model.model.compute_dtype = None
    whole = run(model.bfloat16())
    assert mixed.dtype == whole.dtype == torch.float32
    for got in (mixed, whole):
        # A token may be routed elsewhere; most logits are near.
        assert float((got - want).abs().median()) < 0.05 * float(want.abs().max())
        assert float((got - want).abs().max()) > 0


def test_ids_must_fill_the_packing(model):
    with pytest.raises(AssertionError):
        model(IDS, Packing.of([TOKENS - 1]))


def test_the_same_seed_draws_the_same_weights():
    config = parse_config(tiny_k3())
    for draw in (init_weights, random_weights):
        one, same, other = (draw(Transformer(config), generator(seed)) for seed in (1, 1, 2))
        pairs = zip(one.parameters(), same.parameters(), strict=True)
        assert all(torch.equal(a, b) for a, b in pairs)
        assert not torch.equal(one.lm_head.weight, other.lm_head.weight)


def test_training_starts_as_documented():
    for raw, bounded in ((tiny_k3(), True), (tiny_kimi_linear(), False)):
        model = init_weights(Transformer(parse_config(raw)), generator())
        state = model.requires_grad_(False).state_dict()
        rate = state["model.layers.0.self_attn.A_log"].exp()
        if bounded:
            assert torch.equal(rate, torch.ones_like(rate))
            assert not model.model.output_attn_res_proj.weight.any()
        else:
            assert float(rate.min()) >= 1
            assert float(rate.max()) <= 16
        step = torch.nn.functional.softplus(state["model.layers.0.self_attn.dt_bias"])
        assert 0.9e-3 < float(step.min()) <= float(step.max()) < 1.1e-1
        assert float(model.lm_head.weight.std()) == pytest.approx(0.02, rel=0.1)
        assert torch.equal(model.model.norm.weight, torch.ones(64))
        assert all(bool(torch.isfinite(p).all()) for p in model.parameters())


def test_bf16_decode_scores_are_not_rounded_before_the_softmax():
    draw = generator()
    q = torch.randn(3, 12, generator=draw).bfloat16()
    latent = torch.randn(50, 12, generator=draw).bfloat16()
    q[:, 0] = latent[:, 0] = 16  # scores about 256, where bf16 numbers are 2 apart
    table, length = torch.zeros(1, 1, dtype=torch.int32), torch.tensor([50])
    got = mla_decode(q[None, None], latent[None], table, length, 12, 1.0)[0, 0].float()
    want = torch.softmax(q.double() @ latent.double().T, dim=-1) @ latent.double()
    assert relative(got[:, 1:], want[:, 1:]) < 5e-3
