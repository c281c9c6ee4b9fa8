"""The eps table of docs/numerics.md is what the code does, and its generated block is fresh."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from cogapp import Cog

from perilune.kernels.kda.reference import l2_norm
from perilune.kernels.registry import OPS
from perilune.kernels.router.reference import route
from perilune.model.config import parse_config
from perilune.model.model import Transformer
from perilune.model.norm import RMSNorm
from perilune.model.presets import tiny_k3

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "numerics.md"
LATENT_NORMS = ("q_a_layernorm", "kv_a_layernorm")


def test_the_table_of_tolerances_is_fresh():
    text = PAGE.read_text(encoding="utf-8")
    assert Cog().process_string(text, str(PAGE)) == text
    assert all(f"| `{name}` |" in text for name in OPS)


def test_every_op_has_its_maths_written_down():
    for path in OPS.values():
        folder = ROOT / "src" / Path(*path.split(":")[0].split("."))
        assert "```" in (folder / "README.md").read_text(encoding="utf-8"), folder


@pytest.mark.parametrize("eps", [1e-5, 3e-4])
def test_only_the_latent_norms_have_an_eps_of_their_own(eps):
    model = Transformer(parse_config(tiny_k3(rms_norm_eps=eps), "tiny"))
    norms = {name: m for name, m in model.named_modules() if isinstance(m, RMSNorm)}
    latent = {name for name in norms if name.endswith(LATENT_NORMS)}
    assert latent
    assert {norms[name].eps for name in latent} == {1e-6}
    assert {norm.eps for name, norm in norms.items() if name not in latent} == {eps}


def test_a_norm_adds_eps_to_the_mean():
    norm = RMSNorm(8, 1e-6)
    x_D = torch.linspace(-1, 1, 8) * 1e-3
    expected = x_D.double() / (x_D.double().square().mean() + 1e-6).sqrt()
    torch.testing.assert_close(norm(x_D).double(), expected, rtol=1e-5, atol=0)


def test_the_l2_norm_adds_eps_to_the_sum():
    x = torch.linspace(-1, 1, 8) * 1e-3
    expected = x.double() / (x.double().square().sum() + 1e-6).sqrt()
    torch.testing.assert_close(l2_norm(x).double(), expected, rtol=1e-5, atol=0)


def test_renormalising_scores_that_are_nearly_zero():
    logits_TE = torch.full((1, 4), -46.0)  # sigmoid is about the eps, 1e-20
    routes = route(logits_TE, torch.zeros(4), 1, True, 1.0)
    score = torch.sigmoid(torch.tensor(-46.0)).item()
    assert routes.weight_TR.item() == pytest.approx(score / (score + 1e-20), rel=1e-4)
    assert routes.expert_TR.item() == 0
