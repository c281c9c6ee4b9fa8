"""Saving: bit-exact round trips, standard files, and nothing half done."""

import json

import pytest
import torch
from safetensors import safe_open

from perilune.core.errors import CheckpointError, ConfigError
from perilune.model.init import random_weights
from perilune.model.load import load_checkpoint
from perilune.model.model import Transformer
from perilune.model.mxfp4 import fake_quantize
from perilune.model.parse_config import parse_config
from perilune.model.presets import tiny_k3, tiny_kimi_linear
from perilune.model.save import save_checkpoint
from perilune.model.tensors import text_tensors
from perilune.model.verify import INDEX, verify_checkpoint

RAWS = {
    "k3": tiny_k3(),
    "k3-mxfp4": tiny_k3(mxfp4=True),
    "k3-fp32": tiny_k3(dtype="float32", tie_word_embeddings=True, attn_res_block_size=None),
    "k3-plain": tiny_k3(dtype="float16", num_experts=None, q_lora_rank=None),
    "kimi-linear": tiny_kimi_linear(),
    "kimi-linear-fp32": tiny_kimi_linear(dtype="float32", num_shared_experts=0),
}


def make(raw) -> Transformer:
    config = parse_config(raw)
    return random_weights(Transformer(config), torch.Generator().manual_seed(1))


def contents(directory) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in directory.iterdir()}


@pytest.mark.parametrize("raw", RAWS.values(), ids=RAWS)
@pytest.mark.parametrize("max_shard_bytes", [10**9, 60_000])
def test_save_load_save_gives_the_same_bytes(raw, max_shard_bytes, tmp_path):
    save_checkpoint(make(raw), tmp_path / "a", max_shard_bytes=max_shard_bytes)
    loaded = load_checkpoint(tmp_path / "a").model
    save_checkpoint(loaded, tmp_path / "b", max_shard_bytes=max_shard_bytes)
    save_checkpoint(loaded.freeze(), tmp_path / "c", max_shard_bytes=max_shard_bytes)
    first = contents(tmp_path / "a")
    assert (INDEX in first) == (max_shard_bytes == 60_000)
    assert contents(tmp_path / "b") == first
    assert contents(tmp_path / "c") == first


def test_bf16_compute_round_trips_too(tmp_path):
    save_checkpoint(make(RAWS["k3-mxfp4"]), tmp_path / "a")
    save_checkpoint(load_checkpoint(tmp_path / "a", dtype=torch.bfloat16).model, tmp_path / "b")
    assert contents(tmp_path / "b") == contents(tmp_path / "a")


def test_the_library_reads_the_files_and_finds_what_the_layout_says(tmp_path):
    raw = RAWS["k3-mxfp4"]
    model = make(raw)
    save_checkpoint(model, tmp_path / "a", max_shard_bytes=100_000)
    index = json.loads((tmp_path / "a" / INDEX).read_text())
    state, size = model.state_dict(), 0
    for spec in text_tensors(parse_config(raw)):
        with safe_open(tmp_path / "a" / index["weight_map"][spec.name], framework="pt") as file:
            value = file.get_tensor(spec.name)
        size += value.nbytes
        assert tuple(value.shape) == spec.shape
        if spec.kind == "a_log":
            assert torch.equal(value[:4], state[spec.target])
            assert not value[4:].any()
        elif spec.kind in ("plain", "exact"):
            assert value.dtype == (torch.float32 if spec.kind == "exact" else torch.bfloat16)
            assert torch.equal(value, state[spec.target].to(value.dtype))
    assert index["metadata"]["total_size"] == size


def test_every_tensor_is_aligned_in_the_file(tmp_path):
    save_checkpoint(make(RAWS["k3-mxfp4"]), tmp_path / "a")
    width = {"F32": 4, "BF16": 2, "U8": 1}
    for entry in verify_checkpoint(tmp_path / "a").entries.values():
        assert entry.begin % width[entry.dtype] == 0


def test_shards_keep_to_their_limit_and_their_order(tmp_path):
    save_checkpoint(make(RAWS["k3"]), tmp_path / "a", max_shard_bytes=60_000)
    report = verify_checkpoint(tmp_path / "a")
    sizes = dict.fromkeys(report.files, 0)
    for entry in report.entries.values():
        sizes[entry.file] += entry.num_bytes
    assert max(sizes.values()) <= 60_000
    assert [f.name for f in report.files][-1] == f"model-{len(sizes):05d}-of-{len(sizes):05d}" + (
        ".safetensors"
    )


def test_loading_gives_what_training_with_fake_quantisation_computed(tmp_path):
    model = make(RAWS["k3-mxfp4"])
    save_checkpoint(model, tmp_path / "a")
    loaded = load_checkpoint(tmp_path / "a").model.state_dict()
    for name, value in model.state_dict().items():
        if ".experts." in name:
            assert torch.equal(loaded[name], fake_quantize(value)), name


def test_the_given_config_is_written_and_other_files_are_copied(tmp_path):
    raw = {**RAWS["k3"], "transformers_version": "4.56.2"}
    card = tmp_path / "README.md"
    card.write_text("a card")
    save_checkpoint(make(raw), tmp_path / "a", raw_config=raw, extra_files=[card])
    assert json.loads((tmp_path / "a/config.json").read_text()) == raw
    assert (tmp_path / "a/README.md").read_text() == "a card"


def test_a_config_of_another_model_is_refused(tmp_path):
    with pytest.raises(ConfigError, match="another model"):
        save_checkpoint(make(RAWS["k3"]), tmp_path / "a", raw_config=tiny_k3(hidden_size=32))
    assert list(tmp_path.iterdir()) == []


def test_storage_can_differ_from_the_models_own_config(tmp_path):
    save_checkpoint(
        make(RAWS["k3-mxfp4"]),
        tmp_path / "a",
        raw_config=tiny_k3(dtype="float32", moe_intermediate_size=64),
    )
    entries = verify_checkpoint(tmp_path / "a").entries.values()
    assert {entry.dtype for entry in entries} == {"F32"}


def test_a_full_directory_is_left_alone(tmp_path):
    (tmp_path / "a").mkdir()
    (tmp_path / "a/notes.txt").write_text("mine")
    with pytest.raises(CheckpointError, match="exists and is not empty"):
        save_checkpoint(make(RAWS["k3"]), tmp_path / "a")
    (tmp_path / "file").write_text("mine")
    with pytest.raises(CheckpointError, match="is not a directory"):
        save_checkpoint(make(RAWS["k3"]), tmp_path / "file", overwrite=True)
    assert sorted(p.name for p in tmp_path.rglob("*")) == ["a", "file", "notes.txt"]


def test_overwriting_replaces_the_whole_directory(tmp_path):
    save_checkpoint(make(RAWS["k3"]), tmp_path / "a", max_shard_bytes=60_000)
    save_checkpoint(make(RAWS["kimi-linear"]), tmp_path / "a", overwrite=True)
    assert sorted(contents(tmp_path / "a")) == ["config.json", "model.safetensors"]
    assert [path.name for path in tmp_path.iterdir()] == ["a"]


@pytest.mark.parametrize("overwrite", [False, True])
def test_a_failure_leaves_nothing_behind(tmp_path, overwrite):
    if overwrite:
        save_checkpoint(make(RAWS["k3-mxfp4"]), tmp_path / "a")
    before = contents(tmp_path / "a") if overwrite else None
    broken = make(RAWS["k3-mxfp4"])
    with torch.no_grad():
        broken.model.layers[5].block_sparse_moe.experts.w2[7, 3, 3] = float("nan")
    name = "layers.5.block_sparse_moe.experts.7.w2.weight'"
    with pytest.raises(CheckpointError, match=f"{name}: weights with infinities"):
        save_checkpoint(broken, tmp_path / "a", max_shard_bytes=60_000, overwrite=overwrite)
    assert [path.name for path in tmp_path.iterdir()] == (["a"] if overwrite else [])
    if overwrite:
        assert contents(tmp_path / "a") == before
