"""Ranks that share a model compute what one process does, and all of them the same."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import rank_run
import torch
from pooled_batch import close
from torch import Tensor

from perilune.core.errors import ConfigError
from perilune.model.config import ModelConfig
from perilune.model.load import Part, part_of
from perilune.model.parse_config import parse_config
from perilune.model.presets import preset, tiny_k3, tiny_kimi_linear
from perilune.model.ranks import Ranks, share_of
from perilune.model.save import save_checkpoint

BOUND = 2e-5
"""Of the largest value: sums of fp32 in another order, and layers that amplify it."""
MODELS = {
    "k3": tiny_k3(hidden_size=40, num_hidden_layers=5, moe_intermediate_size=32),
    "k3_mxfp4": tiny_k3(mxfp4=True, num_hidden_layers=4),
    "k3_mxfp4_packed": tiny_k3(mxfp4=True, num_hidden_layers=4),
    "k3_tied_fp32": tiny_k3(num_hidden_layers=4, dtype="float32", tie_word_embeddings=True),
    "kimi_linear": tiny_kimi_linear(hidden_size=40, num_hidden_layers=4),
}
RUNS = [(2, name) for name in MODELS] + [(4, "k3")]
STEPS = 5


class Runs(NamedTuple):
    name: str
    alone: dict[str, Any]
    ranks: list[dict[str, Any]]

    @property
    def config(self) -> ModelConfig:
        return parse_config(MODELS[self.name])


@pytest.fixture(scope="module")
def run_of(draw, tmp_path_factory) -> Callable[[int], dict[str, Runs]]:
    """By model: what one process computed, and what each of so many did."""

    @cache
    def run_of(size: int) -> dict[str, Runs]:
        folder = tmp_path_factory.mktemp("ranks")
        names = [name for each, name in RUNS if each == size]
        alone = {}
        for name in names:
            model = draw(MODELS[name], rank_run.TOKENS, 1, rounded="fp32" not in name).model
            save_checkpoint(model, folder / name)
            alone[name] = rank_run.run(rank_run.loaded(folder / name))
        script = str(Path(rank_run.__file__))
        command = [sys.executable, "-W", "error", script, str(folder), str(size)]
        path = os.pathsep.join(filter(None, sys.path))
        subprocess.run(command, env=os.environ | {"PYTHONPATH": path}, check=True)
        return {
            name: Runs(name, alone[name], [torch.load(folder / f"{name}.{r}") for r in range(size)])
            for name in names
        }

    return run_of


@pytest.fixture(params=RUNS, ids=lambda run: f"{run[1]}_{run[0]}")
def runs(request, run_of) -> Runs:
    size, name = request.param
    return run_of(size)[name]


def test_logits_are_those_of_one_process(runs) -> None:
    for rank in runs.ranks:
        for got, want in zip(rank["logits"], runs.alone["logits"], strict=True):
            close(got, want, BOUND)


def test_all_ranks_have_the_same_bits(runs) -> None:
    """Logits, latent pages, and what the router chose: of ranks that differ there, two could count
    an expert in, or none."""
    first, *others = runs.ranks
    assert first["routes"]
    for other in others:
        for name in ("logits", "routes"):
            for a, b in zip(first[name], other[name], strict=True):
                assert torch.equal(a, b)
        assert torch.equal(first["rows"].nan_to_num(9), other["rows"].nan_to_num(9))


def test_pools_are_those_of_one_process(runs) -> None:
    """States and windows by heads, latents whole; and nothing else is written."""
    states = torch.cat([rank["state"] for rank in runs.ranks], 2)
    written_alike(states, runs.alone["state"])
    written_alike(windows_of(runs), runs.alone["window"])
    for rank in runs.ranks:
        written_alike(rank["rows"], runs.alone["rows"])


def windows_of(runs: Runs) -> Tensor:
    """Of all heads: a rank's queries, keys and values lie side by side."""
    parts = zip(*(rank["window"].chunk(3, -1) for rank in runs.ranks), strict=True)
    return torch.cat([torch.cat(part, -1) for part in parts], -1)


def written_alike(got: Tensor, want: Tensor) -> None:
    assert torch.equal(got.isnan(), want.isnan())
    close(got.nan_to_num(0), want.nan_to_num(0), BOUND)


def test_what_no_sum_precedes_has_the_bits_of_one_process(runs) -> None:
    """The first layer's, of a sequence whose steps had so few tokens that each output of a product
    is a loop of its own."""
    late = runs.alone["late"]
    state_HKV = torch.cat([rank["state"][0, late] for rank in runs.ranks])
    if "fp32" not in runs.name:
        assert torch.equal(state_HKV, runs.alone["state"][0, late])
        assert torch.equal(windows_of(runs)[0, late], runs.alone["window"][0, late])


def test_two_sums_a_layer_and_the_logits_once(runs) -> None:
    steps_of_attention = STEPS * 2 * runs.config.num_layers
    for rank in runs.ranks:
        assert rank["calls"] == {"all_reduce": steps_of_attention, "all_gather": STEPS}


def test_a_rank_holds_its_part_of_every_weight(runs) -> None:
    """The parts in the order of the ranks are the whole; what is not shared out is there whole."""
    shared = set()
    for name, whole in runs.alone["weights"].items():
        parts = [rank["weights"][name] for rank in runs.ranks]
        part = part_of(whole.shape, parts[0].shape, Ranks(0, len(parts)))
        if part is None:
            assert all(torch.equal(each, whole) for each in parts), name
        else:
            shared.add(name.removesuffix(".weight").rpartition(".")[2])
            assert torch.equal(torch.cat(parts, part.dim), whole), name
    assert shared >= {"o_proj", "A_log", "dt_bias", "kv_b_proj", "down_proj", "w13", "w2"}
    assert not shared & {"embed_tokens", "gate", "kv_a_proj_with_mqa", "routed_expert_up_proj"}


def test_a_rank_reads_no_more_than_its_part() -> None:
    assert part_of((8, 6), (8, 6), Ranks(1, 2)) is None
    assert part_of((8, 6), (8, 3), Ranks(1, 2)) == Part(1, 3, 6)
    assert part_of((8, 6), (2, 6), Ranks(3, 4)) == Part(0, 6, 8)


def test_ranks_that_cannot_have_equal_parts_are_refused() -> None:
    for raw, what in (
        (tiny_k3(num_attention_heads=6), r"of 6 \(MLA heads\)"),
        (tiny_k3(linear_attn={"num_heads": 6}), r"of 6 \(KDA heads\)"),
        (tiny_k3(num_experts=10), r"of 10 \(experts\)"),
        (tiny_k3(vocab_size=130), r"of 130 \(vocab_size\)"),
        (tiny_k3(intermediate_size=98), r"of 98 \(intermediate_size\)"),
    ):
        with pytest.raises(ConfigError, match=f"4 ranks cannot have equal parts {what}"):
            share_of(parse_config(raw), Ranks(0, 4))


def test_k3_can_be_shared_by_the_gpus_of_a_host() -> None:
    for size in (2, 4, 8, 16):
        share = share_of(preset("kimi-k3"), Ranks(size - 1, size))
        assert (share.kda.num_heads, share.mla.num_heads) == (96 // size,) * 2
