"""Converting storage: values survive, untouched tensors keep their bytes, vision comes along."""

import json

import pytest
import torch
from safetensors.torch import load_file, save_file

from perilune.core.errors import CheckpointError, ConfigError, UnsupportedError
from perilune.model.convert import convert_checkpoint
from perilune.model.init import random_weights
from perilune.model.load import load_checkpoint
from perilune.model.model import Transformer
from perilune.model.parse_config import parse_config
from perilune.model.presets import tiny_k3, tiny_kimi_linear
from perilune.model.save import save_checkpoint
from perilune.model.verify import SINGLE, verify_checkpoint


def save(directory, raw) -> None:
    model = random_weights(Transformer(parse_config(raw)), torch.Generator().manual_seed(1))
    save_checkpoint(model, directory, raw_config=raw)


def state(directory) -> dict[str, torch.Tensor]:
    return load_checkpoint(directory).model.state_dict()


def assert_same(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> None:
    assert a.keys() == b.keys()
    for name in a:
        assert torch.equal(a[name], b[name]), name


def test_unpacking_and_packing_again_gives_the_first_bytes(tmp_path):
    save(tmp_path / "a", tiny_k3(mxfp4=True))
    report = convert_checkpoint(tmp_path / "a", tmp_path / "b", experts="plain")
    assert "U8" not in {entry.dtype for entry in report.entries.values()}
    assert_same(state(tmp_path / "a"), state(tmp_path / "b"))
    convert_checkpoint(tmp_path / "b", tmp_path / "c", experts="mxfp4")
    assert (tmp_path / "c" / SINGLE).read_bytes() == (tmp_path / "a" / SINGLE).read_bytes()
    assert parse_config(json.loads((tmp_path / "c/config.json").read_text())).experts_mxfp4


@pytest.mark.parametrize("raw", [tiny_k3(mxfp4=True), tiny_kimi_linear()])
def test_wider_storage_keeps_every_value_and_comes_back(raw, tmp_path):
    save(tmp_path / "a", raw)
    report = convert_checkpoint(tmp_path / "a", tmp_path / "b", dtype="float32")
    assert "BF16" not in {entry.dtype for entry in report.entries.values()}
    assert_same(state(tmp_path / "a"), state(tmp_path / "b"))
    convert_checkpoint(tmp_path / "b", tmp_path / "c", dtype="bfloat16")
    assert (tmp_path / "c" / SINGLE).read_bytes() == (tmp_path / "a" / SINGLE).read_bytes()


def test_packing_linear_experts_works_for_kimi_linear_too(tmp_path):
    save(tmp_path / "a", tiny_kimi_linear(moe_intermediate_size=32))
    report = convert_checkpoint(tmp_path / "a", tmp_path / "b", experts="mxfp4")
    assert report.config.experts_mxfp4
    assert report.num_bytes < verify_checkpoint(tmp_path / "a").num_bytes


def test_experts_whose_width_does_not_fit_are_refused(tmp_path):
    save(tmp_path / "a", tiny_k3(moe_intermediate_size=40))
    with pytest.raises(ConfigError, match="multiples of 32"):
        convert_checkpoint(tmp_path / "a", tmp_path / "b", experts="mxfp4")
    assert not (tmp_path / "b").exists()


def test_vision_and_other_files_come_along_but_no_pickle(tmp_path):
    save(tmp_path / "a", tiny_k3(vision={}))
    path = tmp_path / "a" / SINGLE
    vision = {"vision_tower.x.weight": torch.randn(3), "mm_projector.y.weight": torch.randn(2, 2)}
    save_file({**load_file(path), **vision}, path)
    (tmp_path / "a/tiktoken.model").write_text("ranks")
    (tmp_path / "a/training_args.bin").write_bytes(b"\x80\x02")
    report = convert_checkpoint(tmp_path / "a", tmp_path / "b", dtype="float32")
    assert sorted(report.skipped) == sorted(vision)
    stored = load_file(tmp_path / "b" / SINGLE)
    assert all(torch.equal(stored[name], value) for name, value in vision.items())
    names = sorted(path.name for path in (tmp_path / "b").iterdir())
    assert names == ["config.json", SINGLE, "tiktoken.model"]


def test_a_bad_source_or_a_full_target_changes_nothing(tmp_path):
    save(tmp_path / "a", tiny_k3())
    with pytest.raises(CheckpointError, match="not empty"):
        convert_checkpoint(tmp_path / "a", tmp_path / "a")
    with pytest.raises(UnsupportedError, match="dtype must be"):
        convert_checkpoint(tmp_path / "a", tmp_path / "b", dtype="int8")
    path = tmp_path / "a" / SINGLE
    path.write_bytes(path.read_bytes()[:-1])
    with pytest.raises(CheckpointError, match="truncated"):
        convert_checkpoint(tmp_path / "a", tmp_path / "b")
    assert [p.name for p in tmp_path.iterdir()] == ["a"]
