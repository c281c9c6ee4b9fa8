"""A whole model on the kernels for a GPU, interpreted: the references' logits and greedy tokens."""

from __future__ import annotations

import pytest
import torch

from perilune.engine.generate import generate
from perilune.kernels import registry
from perilune.kernels.registry import load_attr, spec
from perilune.kernels.serving import Serving
from perilune.model.api import LanguageModel
from perilune.model.init import random_weights
from perilune.model.model import Transformer
from perilune.model.parse_config import parse_config
from perilune.model.pools import Pools
from perilune.model.presets import tiny_k3, tiny_kimi_linear
from perilune.model.step import Cut, Decoding, Prefilling

# Scores above the diagonal, masked before they are used, may overflow.
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")

IN_TRITON = {
    *("kda_chunk", "kda_step", "causal_conv", "gated_rms_norm", "rms_norm"),
    *("attn_res", "situ", "router", "scores", "sigmoid_gate"),
}
LIMIT = 5e-5
"""max |difference| / max |logit|: a few layers of ops that are each within 2e-5."""


@pytest.fixture
def served_by(monkeypatch):
    """Has every op run what it runs on cuda, or its reference; in both cases on CPU tensors."""

    def served_by(which: str) -> None:
        def serving(declared, device, choice=None):
            path = declared.backends.get(which, declared.reference)
            return Serving(path, "for the test")

        monkeypatch.setattr(registry, "serving", serving)
        forget()

    yield served_by
    monkeypatch.undo()
    forget()


def forget() -> None:
    for op in list(registry._ops):
        op.forget()


@pytest.fixture(scope="module", params=[tiny_k3, tiny_kimi_linear])
def model(request) -> LanguageModel:
    sizes = {"num_heads": 2, "head_dim": 16}
    config = parse_config(request.param(num_hidden_layers=3, linear_attn=sizes))
    weights = random_weights(Transformer(config), torch.Generator().manual_seed(5))
    return LanguageModel(weights)


def ids(model: LanguageModel, count: int, seed: int = 6) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(model.config.vocab_size, (count,), generator=generator)


def difference(got: torch.Tensor, want: torch.Tensor) -> float:
    assert torch.equal(got.argmax(-1), want.argmax(-1))
    return float((got - want).abs().max() / want.abs().max())


@torch.inference_mode()
def in_pieces(model: LanguageModel) -> torch.Tensor:
    """Two sequences on pools: prompts in chunks, a state cut out, then decoding alone, beside a
    chunk and together."""
    tokens, lengths = iter(ids(model, 61).tolist()), [0, 0]
    device = torch.device("cpu")
    pools = Pools.of(model.config, slots=3, pages=3, device=device, dtype=torch.float32)
    logits = []
    for counts in ([33, 7], [1, 0], [1, 12], [1, 1], [1, 1], [2, 1]):
        decoding, chunks = [], []
        for n, count in enumerate(counts):
            done, lengths[n] = lengths[n], lengths[n] + count
            if count == 1:
                decoding.append(Decoding(n, [n + 1], lengths[n]))
            elif count:
                cuts = [Cut(5, 2)] if count > 5 and n else []
                chunks.append(Prefilling(n, [n + 1], done, count, cuts, count))
        token_ids = torch.tensor([next(tokens) for _ in range(sum(counts))])
        logits.append(model.model.step(token_ids, pools, pools.step(decoding, chunks)))
    return torch.cat(logits)


def test_the_ops_of_a_gpu_are_in_triton():
    used = {op.name for op in registry._ops} & set(registry.resolved())
    cuda = {name: spec(name).backends.get("cuda", "") for name in used}
    assert {name for name, path in cuda.items() if ".triton:" in path} >= IN_TRITON


def test_the_logits_are_the_references(model, served_by):
    served_by("reference")
    want = in_pieces(model)
    served_by("cuda")
    assert difference(in_pieces(model), want) < LIMIT
    [chosen] = {op._chosen["cpu"] for op in registry._ops if op.name == "kda_chunk" and op._chosen}
    assert chosen is load_attr(spec("kda_chunk").backends["cuda"])


def test_the_greedy_tokens_are_the_references(model, served_by):
    prompts = [ids(model, n, seed=n).tolist() for n in (1, 3, 20)]
    answers = []
    for which in ("reference", "cuda"):
        served_by(which)
        out = generate(model, prompts, max_tokens=4, ignore_eos=True, max_running=2)
        answers.append([each.token_ids for each in out])
    assert answers[0] == answers[1]
