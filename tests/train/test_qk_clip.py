"""QK-Clip: the threshold is met, by those heads alone that were above it."""

import math
from dataclasses import replace

import pytest
import torch
from torch.utils.checkpoint import checkpoint

from perilune.kernels.common.packing import Packing
from perilune.kernels.mla.absorb import queries
from perilune.model.mla import MLA
from perilune.model.parse_config import parse_config
from perilune.model.presets import tiny_k3, tiny_kimi_linear
from perilune.train import qk_clip
from perilune.train.data import PADDING
from perilune.train.loop import build_model, open_loader
from perilune.train.optim import build_optimizers
from perilune.train.qk_clip import QKClip, largest_logits, scale_heads
from perilune.train.step import DeviceBatch, Stepper

# Two rows: documents of 5, 4 and 3 tokens beside padding, and one of 14.
SEGMENTS = torch.tensor([[0] * 5 + [1] * 4 + [2] * 3 + [PADDING] * 2, [0] * 14])
PACKING = Packing.rows(SEGMENTS)
CONFIGS = {
    "k3": tiny_k3(v_head_dim=12),
    "kimi_linear": tiny_kimi_linear(),
    "nothing_shared": tiny_k3(qk_rope_head_dim=0),
}


def layer(name="k3", scales=(1.0, 1.0, 3.0, 1.0)):
    """In training; heads have larger logits by these factors."""
    mla = MLA(parse_config(CONFIGS[name]))
    generator = torch.Generator().manual_seed(1)
    for p in mla.parameters():
        torch.nn.init.normal_(p, std=p.shape[-1] ** -0.5, generator=generator)
    with torch.no_grad():
        scale_heads(mla, torch.tensor(scales))
    return mla.train()


def inputs(seed=2):
    return torch.randn(SEGMENTS.numel(), 64, generator=torch.Generator().manual_seed(seed))


class Seen:
    """What a layer hands to its watch."""

    def __call__(self, *given):
        self.given = [x.detach().clone() for x in given[:3]]
        self.scale = given[4]


def queries_and_keys(mla, x):
    mla.watch = seen = Seen()
    mla(x, PACKING, None)
    mla.watch = None
    return seen


def slow_logits(mla, x):
    """Every logit of every head that attention sees, pair by pair."""
    seen = queries_and_keys(mla, x)
    q, k, shared = seen.given
    segments, length = SEGMENTS.flatten().tolist(), SEGMENTS.shape[1]
    logits = [[] for _ in range(q.shape[1])]
    for t, segment in enumerate(segments):
        for s in range(t // length * length, t + 1):
            if segment == segments[s] != PADDING:
                for h, of_head in enumerate(logits):
                    key = torch.cat([k[s, h], shared[s]])
                    of_head.append(float(q[t, h] @ key) * seen.scale)
    return torch.tensor(logits)


@pytest.mark.parametrize("at_once", [1, 7, 1 << 26])
def test_largest_logits_are_those_of_all_pairs(at_once, monkeypatch):
    mla = layer()
    expected = slow_logits(mla, inputs()).amax(1)
    # Rows times heads times keys: so many queries at once.
    monkeypatch.setattr(qk_clip, "SCORES", at_once * 2 * 4 * 14)
    seen = queries_and_keys(mla, inputs())
    found = largest_logits(*seen.given, PACKING, seen.scale)
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-6)


def test_padding_alone_has_no_logit():
    nothing = Packing.rows(torch.full((1, 6), PADDING))
    q, k, shared = torch.ones(6, 2, 5), torch.ones(6, 2, 3), torch.ones(6, 2)
    assert largest_logits(q, k, shared, nothing, 1.0).tolist() == [-math.inf] * 2


@pytest.mark.parametrize("name", CONFIGS)
def test_heads_above_the_threshold_meet_it_and_others_keep_every_bit(name):
    mla, x = layer(name), inputs()
    before = slow_logits(mla, x)
    heights = before.amax(1)
    threshold = float(heights.sort().values[-2] + 1e-3)  # one head is above
    top = int(heights.argmax())
    others = [h for h in range(4) if h != top]
    weights = {key: p.detach().clone() for key, p in mla.named_parameters()}

    clip = QKClip([mla], threshold)
    mla(x, PACKING, None)
    assert float(clip.clip()) == pytest.approx(float(heights[top]), rel=1e-5)
    after = slow_logits(mla, x)
    assert torch.equal(after[others], before[others])
    # Every logit of the head, not the largest alone.
    torch.testing.assert_close(after[top], before[top] * threshold / heights[top])
    assert float(after[top].amax()) == pytest.approx(threshold, rel=1e-5)

    config = mla.mla
    own, v = config.qk_nope_head_dim, config.v_head_dim
    changed = {k for k, p in mla.named_parameters() if not torch.equal(p, weights[k])}
    query = "q_proj.weight" if config.q_lora_rank is None else "q_b_proj.weight"
    assert changed == {query, "kv_b_proj.weight"}
    moved = mla.kv_b_proj.weight != weights["kv_b_proj.weight"]
    assert moved.view(4, own + v, -1).any(-1).nonzero().tolist() == [[top, i] for i in range(own)]
    moved = mla.get_parameter(query) != weights[query]
    assert moved.view(4, config.qk_head_dim, -1).any(-1).any(1).nonzero().tolist() == [[top]]


def test_absorbed_attention_has_the_clipped_logits():
    """Decoding multiplies the key rows into the query: the same factors come out."""
    mla, x = layer(), inputs()
    own, shared = mla.mla.qk_nope_head_dim, mla.mla.qk_rope_head_dim

    def absorbed():
        q_THK = queries_and_keys(mla, x).given[0]
        c_TC, shared_TR = mla.kv_a_proj_with_mqa(x).split([mla.mla.kv_lora_rank, shared], dim=-1)
        latent_TC = torch.cat([mla.kv_a_layernorm(c_TC), shared_TR], dim=-1)
        weight_HXC = mla.kv_b_proj.weight.view(4, -1, mla.mla.kv_lora_rank)
        q_own, q_shared = q_THK.split([own, shared], dim=-1)
        return torch.einsum("thc,sc->hts", queries(q_own, weight_HXC[:, :own], q_shared), latent_TC)

    with torch.no_grad():
        before = absorbed()
        scale_heads(mla, torch.tensor([1.0, 0.25, 1.0, 0.5]))
        after = absorbed()
    torch.testing.assert_close(after, before * torch.tensor([1.0, 0.25, 1.0, 0.5])[:, None, None])


def test_what_is_recomputed_or_evaluated_does_not_count():
    mla, x = layer(), inputs().requires_grad_()
    clip = QKClip([mla], 1e9)
    mla(x, PACKING, None)
    largest = float(clip.clip())
    checkpoint(lambda x: mla(x, PACKING, None), x, use_reentrant=False).sum().backward()
    assert float(clip.clip()) == pytest.approx(largest)
    mla.eval()(10 * x, PACKING, None)
    assert float(clip.clip()) == -math.inf


def test_micro_batches_count_together_and_a_step_starts_afresh():
    mla = layer()
    clip, found = QKClip([mla], 1e9), []
    for seeds in ((2,), (3,), (2, 3), (3, 2)):
        for seed in seeds:
            mla((1 + seed) * inputs(seed), PACKING, None)
        found.append(float(clip.clip()))
    assert found[2] == found[3] == max(found[:2])
    assert found[0] != found[1]


def test_the_gradient_is_that_without_a_watch():
    grads = []
    for is_watched in (False, True):
        mla = layer()
        if is_watched:
            QKClip([mla], 1.0)
        mla(inputs(), PACKING, None).square().sum().backward()
        grads.append([p.grad for p in mla.parameters()])
    assert all(torch.equal(a, b) for a, b in zip(*grads, strict=True))


def test_a_compiled_layer_sees_the_same_logits():
    mla = layer()
    clip = QKClip([mla], 1e9)
    mla(inputs(), PACKING, None)
    expected = float(clip.clip())
    call = torch.compile(mla, backend="aot_eager", dynamic=False, fullgraph=True)
    call(inputs(), PACKING, None).sum().backward()
    torch.compiler.reset()
    assert float(clip.clip()) == pytest.approx(expected)


def test_ranks_clip_by_the_largest_of_all():
    mla, x = layer(), inputs()
    clip = QKClip([mla], 2.0, largest=lambda logits: torch.full_like(logits, 8.0))
    before = slow_logits(mla, x)
    mla.watch = clip.watches[0]
    mla(x, PACKING, None)
    assert float(clip.clip()) == 8.0
    torch.testing.assert_close(slow_logits(mla, x), before / 4)


def test_a_step_clips_and_reports_only_where_it_is_asked_to(tiny_run):
    found = {}
    for threshold in (0.0, 1e9, 1e-3):
        optim = replace(tiny_run.optim, qk_clip=threshold)
        model = build_model(tiny_run)
        stepper = Stepper(model, build_optimizers(model, optim), replace(tiny_run, optim=optim))
        result = stepper(0, DeviceBatch.of(next(open_loader(tiny_run)), "cpu"))
        found[threshold] = model.state_dict()
        assert ("max_logit" in result.scalars()) == bool(threshold)
        watched = [module for module in model.modules() if isinstance(module, MLA) and module.watch]
        assert bool(watched) == bool(threshold)
    off, high, low = found.values()
    assert all(torch.equal(off[name], high[name]) for name in off)
    changed = {name.rsplit(".", 2)[1] for name in off if not torch.equal(off[name], low[name])}
    assert changed == {"q_b_proj", "kv_b_proj"}
