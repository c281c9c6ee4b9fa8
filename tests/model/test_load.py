"""Loading: every tensor used, corrupt values refused, and other libraries' files understood."""

import json

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from perilune.core.errors import CheckpointError
from perilune.kernels.common.packing import Packing
from perilune.model.init import random_weights
from perilune.model.load import load_checkpoint
from perilune.model.model import Transformer
from perilune.model.moe import MoE
from perilune.model.packed_experts import PackedExperts
from perilune.model.parse_config import parse_config
from perilune.model.presets import tiny_k3, tiny_kimi_linear
from perilune.model.save import save_checkpoint
from perilune.model.verify import SINGLE, verify_checkpoint

IDS = torch.randint(0, 128, (17,), generator=torch.Generator().manual_seed(5))


def make(raw) -> Transformer:
    config = parse_config(raw)
    return random_weights(Transformer(config), torch.Generator().manual_seed(1))


def logits(model: Transformer) -> torch.Tensor:
    with torch.inference_mode():
        return model(IDS, Packing.of([len(IDS)]))


def poke(directory, name: str, offset: int, value: bytes) -> None:
    """Overwrites bytes of one stored tensor in place."""
    entry = verify_checkpoint(directory).entries[name]
    with entry.file.open("r+b") as file:
        file.seek(entry.begin + offset)
        file.write(value)


@pytest.mark.parametrize("raw", [tiny_k3(dtype="float32"), tiny_kimi_linear(dtype="float32")])
def test_fp32_files_give_the_same_model(raw, tmp_path):
    model = make(raw)
    save_checkpoint(model, tmp_path / "a")
    loaded = load_checkpoint(tmp_path / "a").model
    state = model.state_dict()
    for name, value in loaded.state_dict().items():
        assert torch.equal(value, state[name]), name
    assert torch.equal(logits(loaded), logits(model))


def test_weights_take_the_dtype_but_for_those_kept_in_fp32(tmp_path):
    save_checkpoint(make(tiny_k3(dtype="float32")), tmp_path / "a")
    state = load_checkpoint(tmp_path / "a", dtype=torch.bfloat16).model.state_dict()
    kept = ("A_log", "dt_bias", "conv1d.weight", "o_norm.weight", "e_score_correction_bias")
    for name, value in state.items():
        wanted = torch.float32 if name.endswith(kept) else torch.bfloat16
        assert value.dtype == wanted, name


def test_loaded_weights_do_not_depend_on_the_file(tmp_path):
    save_checkpoint(make(tiny_k3(dtype="float32")), tmp_path / "a")
    loaded = load_checkpoint(tmp_path / "a").model
    before = logits(loaded)
    path = tmp_path / "a" / SINGLE
    with path.open("r+b") as file:
        file.write(b"\xff" * path.stat().st_size)
    assert torch.equal(logits(loaded), before)


def test_a_corrupt_scale_is_named(tmp_path):
    save_checkpoint(make(tiny_k3(mxfp4=True)), tmp_path / "a")
    name = "language_model.model.layers.3.block_sparse_moe.experts.5.w3.weight_scale"
    poke(tmp_path / "a", name, 7, b"\xff")
    with pytest.raises(CheckpointError, match=f"model.safetensors: tensor '{name}': .* 255"):
        load_checkpoint(tmp_path / "a")


def test_padding_of_a_log_must_be_zero(tmp_path):
    save_checkpoint(make(tiny_k3()), tmp_path / "a")
    name = "language_model.model.layers.1.self_attn.A_log"
    poke(tmp_path / "a", name, 4 * 4, b"\x01")
    with pytest.raises(CheckpointError, match=f"{name}': the padding after 4 heads is not zero"):
        load_checkpoint(tmp_path / "a")


@pytest.mark.parametrize("entries", [4, 5, 8, 128])
def test_any_padding_of_a_log_loads(entries, tmp_path):
    save_checkpoint(make(tiny_k3()), tmp_path / "a")
    path = tmp_path / "a" / SINGLE
    data = path.read_bytes()
    start = 8 + int.from_bytes(data[:8], "little")
    header = json.loads(data[8:start])
    body, offset = b"", 0
    for name, entry in header.items():
        if name == "__metadata__":
            continue
        begin, end = entry["data_offsets"]
        piece = data[start + begin : start + end]
        if name.endswith("A_log"):
            entry["shape"] = [entries]
            piece = piece[: 4 * entries]
        entry["data_offsets"] = [offset, offset + len(piece)]
        body, offset = body + piece, offset + len(piece)
    wanted = load_checkpoint(tmp_path / "a").model.state_dict()
    text = json.dumps(header).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text + body)
    for name, value in load_checkpoint(tmp_path / "a").model.state_dict().items():
        assert torch.equal(value, wanted[name])


def test_vision_tensors_are_skipped_and_reported(tmp_path):
    save_checkpoint(make(tiny_k3()), tmp_path / "a")
    path = tmp_path / "a" / SINGLE
    names = ["mm_projector.proj.0.weight", "vision_tower.patch_embed.proj.weight"]
    save_file({**load_file(path), **{name: torch.ones(3) for name in names}}, path)
    loaded = load_checkpoint(tmp_path / "a")
    assert sorted(loaded.report.skipped) == names


def test_a_checkpoint_that_transformers_saved(tmp_path):
    from transformers import KimiLinearConfig, KimiLinearForCausalLM

    raw = tiny_kimi_linear(dtype="float32", num_key_value_heads=4)
    config = KimiLinearConfig(**{k: v for k, v in raw.items() if k != "model_type"})
    torch.manual_seed(0)
    oracle = KimiLinearForCausalLM(config).eval().float()
    for name, value in oracle.state_dict().items():
        if "norm" not in name:
            value.copy_(torch.randn(value.shape) * 0.3)
    oracle.save_pretrained(tmp_path / "a")
    # transformers 5.24 writes the dense layer's MLP under the name of an MoE; the release does not.
    path = tmp_path / "a" / SINGLE
    wrong, right = "layers.0.block_sparse_moe.", "layers.0.mlp."
    save_file({name.replace(wrong, right): value for name, value in load_file(path).items()}, path)
    with torch.inference_mode():
        wanted = oracle(IDS[None], use_cache=False).logits[0]
    ours = logits(load_checkpoint(tmp_path / "a").model)
    assert (ours - wanted).abs().max() <= 1e-3 * wanted.abs().max()


def test_mlx_reads_what_was_saved(tmp_path):
    """Names, prefix, packing, padding: an independent loader gets the same logits."""
    import mlx.core as mx
    import mlx.nn as nn
    from mlx_lm.models import kimi_k3

    raw = tiny_k3(mxfp4=True)
    save_checkpoint(make(raw), tmp_path / "a", max_shard_bytes=100_000)
    arrays = {}
    for path in sorted((tmp_path / "a").glob("*.safetensors")):
        arrays.update(mx.load(str(path)))
    arrays = {n: a if a.dtype == mx.uint8 else a.astype(mx.float32) for n, a in arrays.items()}
    theirs = kimi_k3.Model(kimi_k3.ModelArgs.from_dict(raw))
    weights = theirs.sanitize(arrays)
    nn.quantize(
        theirs,
        group_size=32,
        bits=4,
        mode="mxfp4",
        class_predicate=lambda path, _: f"{path}.scales" in weights,
    )
    theirs.load_weights(list(weights.items()), strict=True)
    theirs.eval()
    wanted = torch.from_numpy(np.array(theirs(mx.array(IDS.numpy())[None])))[0]
    ours = logits(load_checkpoint(tmp_path / "a").model)
    assert (ours - wanted).abs().max() <= 1e-3 * wanted.abs().max()


@pytest.mark.parametrize("experts", [3, 8])
def test_experts_that_stay_packed_answer_the_same(experts, tmp_path):
    raw = tiny_k3(mxfp4=True, num_experts=experts, num_experts_per_token=2)
    save_checkpoint(make(raw), tmp_path / "a")
    plain = load_checkpoint(tmp_path / "a").model
    packed = load_checkpoint(tmp_path / "a", keep_packed=True).model
    held = [x for x in packed.modules() if isinstance(x, PackedExperts)]
    moe = parse_config(raw).moe
    assert len(held) == sum(isinstance(x, MoE) for x in plain.modules())
    assert all(x.w13.dtype == x.w2.dtype == torch.int32 for x in held)
    assert moe is not None
    assert {len(x.w2) for x in held} == {moe.num_experts}
    assert not any(x.wide for x in held)
    want = logits(plain.freeze())
    assert (logits(packed.freeze()) - want).norm() < 1e-5 * want.norm()


def test_scales_beyond_two_are_noticed(tmp_path):
    save_checkpoint(make(tiny_k3(mxfp4=True)), tmp_path / "a")
    names = verify_checkpoint(tmp_path / "a").entries
    name = next(n for n in names if n.endswith("w3.weight_scale"))
    poke(tmp_path / "a", name, 5, b"\x82")
    loaded = [load_checkpoint(tmp_path / "a", keep_packed=keep).model for keep in (True, False)]
    assert [x.wide for x in loaded[0].modules() if isinstance(x, PackedExperts)].count(True) == 1
    packed, plain = (logits(x.freeze()) for x in loaded)
    assert (packed - plain).norm() < 1e-5 * plain.norm()


def test_a_scale_that_is_no_number_is_refused_where_experts_stay_packed(tmp_path):
    save_checkpoint(make(tiny_k3(mxfp4=True)), tmp_path / "a")
    name = next(n for n in verify_checkpoint(tmp_path / "a").entries if n.endswith("_scale"))
    poke(tmp_path / "a", name, 0, b"\xff")
    with pytest.raises(CheckpointError, match="255"):
        load_checkpoint(tmp_path / "a", keep_packed=True)


def test_plain_experts_are_never_packed(tmp_path):
    save_checkpoint(make(tiny_k3(dtype="float32")), tmp_path / "a")
    model = load_checkpoint(tmp_path / "a", keep_packed=True).model
    assert not any(isinstance(x, PackedExperts) for x in model.modules())
