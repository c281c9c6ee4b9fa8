"""Every eps of the architecture, in the module that uses it, on inputs as small as the eps.

Whole models do not show a wrong eps: relative logit changes of 1e-5 drown in rounding.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from perilune.kernels.common.packing import Packing
from perilune.kernels.kda.reference import kda_decode
from perilune.kernels.registry import resolve
from perilune.model import kda as kda_module
from perilune.model.attn_res import AttnResStream
from perilune.model.init import random_weights
from perilune.model.model import Transformer
from perilune.model.norm import RMSNorm
from perilune.model.parse_config import parse_config
from perilune.model.pools import Pooled, Pools
from perilune.model.presets import tiny_k3, tiny_kimi_linear
from perilune.model.step import Decoding

SMALL = 1e-3
EPS = {
    "q_a_layernorm": 1e-6,
    "kv_a_layernorm": 1e-6,
    "input_layernorm": 1e-5,
    "post_attention_layernorm": 1e-5,
    "model.norm": 1e-5,
    "o_norm": 1e-5,
    "routed_expert_norm": 1e-5,
    "self_attention_res_norm": 1e-5,
    "mlp_res_norm": 1e-5,
    "output_attn_res_norm": 1e-5,
}


def assert_has_eps(got: Tensor, formula: Callable[[float], Tensor], eps: float) -> None:
    """`got` is the float64 `formula` at `eps` and clearly not at ten times it or at a tenth."""
    scale = float(formula(eps).abs().max())

    def gap(at: float) -> float:
        return float((got.double() - formula(at)).abs().max()) / scale

    assert gap(eps) < 1e-5
    assert gap(eps * 10) > 1e-2
    assert gap(eps / 10) > 1e-2


def small(*shape: int) -> Tensor:
    return SMALL * torch.randn(shape, generator=torch.Generator().manual_seed(3))


def normed(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    x = x.double()
    return x / (x.square().mean(-1, keepdim=True) + eps).sqrt() * weight.double()


@pytest.fixture(scope="module", params=[tiny_k3, tiny_kimi_linear], ids=["k3", "kimi_linear"])
def model(request) -> Transformer:
    model = Transformer(parse_config(request.param()))
    return random_weights(model, torch.Generator().manual_seed(1)).requires_grad_(False)


def test_every_norm_has_its_eps(model):
    norms = {name: m for name, m in model.named_modules() if isinstance(m, RMSNorm)}
    found = set()
    for name, norm in norms.items():
        place = next(place for place in EPS if name.endswith(place))
        x, weight = small(4, norm.weight.shape[0]), norm.weight
        assert_has_eps(norm(x), lambda eps, x=x, w=weight: normed(x, w, eps), EPS[place])
        found.add(place)
    is_k3 = model.config.family == "kimi_k3"
    assert found == (set(EPS) if is_k3 else set(list(EPS)[1:6]))


def test_attention_over_residuals_uses_the_eps_of_its_norm(model):
    if model.config.attn_res_block_size is None:
        assert not any("res_norm" in name for name, _ in model.named_parameters())
        return
    layer, top = model.model.layers[3], model.model
    reads = [
        (layer.self_attention_res_proj, layer.self_attention_res_norm),
        (layer.mlp_res_proj, layer.mlp_res_norm),
        (top.output_attn_res_proj, top.output_attn_res_norm),
    ]
    sources = small(3, 5, model.config.hidden_size)
    for query, norm in reads:
        stream = AttnResStream(sources[2])
        stream.blocks = [sources[0], sources[1]]

        def formula(eps: float, query=query, norm=norm) -> Tensor:
            score = (normed(sources, norm.weight, eps) * query.weight[0].double()).sum(-1)
            return (torch.softmax(score, dim=0)[..., None] * sources.double()).sum(0)

        assert_has_eps(stream.read(query, norm), formula, 1e-5)


def test_the_output_norm_of_kda_adds_1e_5(model, monkeypatch):
    calls = []
    op = resolve("gated_rms_norm")

    def recorded(*args):
        calls.append((*args, op(*args)))
        return calls[-1][-1]

    monkeypatch.setattr(kda_module, "gated_rms_norm", recorded)
    layer = model.model.layers[0].self_attn
    layer(small(5, model.config.hidden_size), Packing.of([5]), None)
    o_THK, gate_THK, weight_K, _, got = calls[0]
    assert float(o_THK.square().mean().sqrt()) < 1e-2
    assert_has_eps(
        got,
        lambda eps: normed(o_THK, weight_K, eps) * torch.sigmoid(gate_THK.double()),
        1e-5,
    )


def test_a_decoded_token_sees_the_same_eps_as_a_prompt(model):
    layer = model.model.layers[0].self_attn
    x = small(1, model.config.hidden_size)
    pools = Pools.of(model.config, slots=1, pages=2, device=x.device, dtype=x.dtype)
    decoded = layer(x, None, Pooled(pools.layers[0], pools.step([Decoding(0, [1], 1)])))
    torch.testing.assert_close(decoded, layer(x, Packing.of([1]), None))


@pytest.mark.parametrize("decoded", [False, True])
def test_the_l2_norm_of_kda_adds_1e_6_to_the_sum(decoded):
    """From an empty state one token reads beta (q . k) v back, with both vectors normalised."""
    heads, width = 3, 8
    q, k, v = small(3, 1, heads, width).unbind()
    k, v = k + 0.5 * q, v / SMALL
    z, b = torch.zeros(1, heads, width), torch.tensor([[0.3, -1.0, 2.0]])
    gate = (torch.zeros(heads), torch.zeros(heads, width))
    state = torch.zeros(1, heads, width, width)
    if decoded:
        got = kda_decode(q, k, v, z, b, *gate, state, -5.0)
    else:
        got = resolve("kda_chunk")(q, k, v, z, b, *gate, Packing.of([1]), -5.0, state).o_THV

    def formula(eps: float) -> Tensor:
        sums = [x.double().square().sum(-1) + eps for x in (q, k)]
        cosine = (q.double() * k.double()).sum(-1) / (sums[0] * sums[1]).sqrt()
        read = cosine * width**-0.5 * torch.sigmoid(b.double())
        return read[..., None] * v.double()

    assert_has_eps(got, formula, 1e-6)


def test_the_router_adds_1e_20_to_the_sum(model):
    """Two scores of about 1e-20: the smallest that a renormalisation can feel."""
    moe = model.model.layers[1].block_sparse_moe
    k = moe.gate.moe.num_experts_per_token
    logits_TE = torch.full((1, 8), -46.0) - 0.1 * torch.arange(8)
    # An input that the router maps to these logits.
    x_TD = torch.linalg.lstsq(moe.gate.weight.double(), logits_TE.double().T).solution.T
    routes = moe.gate(x_TD.float())

    def formula(eps: float) -> Tensor:
        score = torch.sigmoid(moe.gate.weight.double() @ x_TD.float().double().T).T
        chosen = score.gather(-1, routes.expert_TR)
        return chosen / (chosen.sum(-1, keepdim=True) + eps) * moe.gate.moe.routed_scaling_factor

    assert routes.weight_TR.shape == (1, k)
    scale = formula(1e-20)
    assert float(((routes.weight_TR - scale) / scale).abs().max()) < 1e-3
    for other in (1e-19, 1e-21, 0.0):
        assert float(((routes.weight_TR - formula(other)) / scale).abs().max()) > 1e-2
