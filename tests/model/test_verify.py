"""`verify`: each kind of damage gives one clear error, and no damage gives anything else."""

import contextlib
import json
import os
import pickle
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from perilune.core.errors import CheckpointError, ConfigError, PeriluneError
from perilune.model.init import random_weights
from perilune.model.model import Transformer
from perilune.model.parse_config import parse_config
from perilune.model.presets import tiny_k3
from perilune.model.save import save_checkpoint
from perilune.model.shard import read_header
from perilune.model.verify import INDEX, SINGLE, verify_checkpoint

RAW = tiny_k3(mxfp4=True, num_hidden_layers=2, num_experts=3, vision={})
NORM = "language_model.model.norm.weight"
SCALE = "language_model.model.layers.1.block_sparse_moe.experts.2.w1.weight_scale"
Header = dict[str, dict]


@pytest.fixture(scope="module")
def files(tmp_path_factory) -> dict[str, dict[str, bytes]]:
    """The bytes of one checkpoint, as a single file and in three shards."""
    root = tmp_path_factory.mktemp("source")
    model = Transformer(parse_config(RAW))
    random_weights(model, torch.Generator().manual_seed(0))
    save_checkpoint(model, root / "single", raw_config=RAW)
    save_checkpoint(model, root / "shards", raw_config=RAW, max_shard_bytes=100_000)
    return {
        kind: {path.name: path.read_bytes() for path in (root / kind).iterdir()}
        for kind in ("single", "shards")
    }


def write(directory: Path, files: dict[str, bytes]) -> Path:
    directory.mkdir(exist_ok=True)
    for name, data in files.items():
        (directory / name).write_bytes(data)
    return directory


def edit_header(data: bytes, edit: Callable[[Header], object], body: bytes | None = None) -> bytes:
    length = int.from_bytes(data[:8], "little")
    header = json.loads(data[8 : 8 + length])
    edit(header)
    text = json.dumps(header).encode()
    rest = data[8 + length :] if body is None else body
    return len(text).to_bytes(8, "little") + text + rest


def rename(old: str, new: str) -> Callable[[Header], object]:
    return lambda header: header.update({new: header.pop(old)})


def test_a_good_checkpoint_is_counted(files, tmp_path):
    single = verify_checkpoint(write(tmp_path / "a", files["single"]))
    shards = verify_checkpoint(write(tmp_path / "b", files["shards"]))
    assert len(single.files) == 1
    assert len(shards.files) > 2
    assert single.num_tensors == shards.num_tensors
    assert single.num_bytes == shards.num_bytes
    index = json.loads(files["shards"][INDEX])
    assert index["metadata"]["total_size"] == shards.num_bytes
    assert single.skipped == ()
    assert single.notes == ("config.json has a vision_config, but there is no vision tensor",)


def test_vision_tensors_are_skipped_and_counted(files, tmp_path):
    def add(header: Header) -> None:
        end = max(v["data_offsets"][1] for k, v in header.items() if k != "__metadata__")
        for i, name in enumerate(("vision_tower.encoder.x.weight", "mm_projector.proj.0.weight")):
            at = end + 4 * i
            header[name] = {"dtype": "BF16", "shape": [2], "data_offsets": [at, at + 4]}

    data = edit_header(files["single"][SINGLE], add) + b"\0" * 8
    report = verify_checkpoint(write(tmp_path / "a", {**files["single"], SINGLE: data}))
    assert len(report.skipped) == 2
    assert report.skipped_bytes == 8
    assert report.notes == ()


@pytest.mark.parametrize(
    ("edit", "message"),
    [
        (lambda h: h[NORM].update(shape=[8, 8]), r"norm.weight' has shape \[8, 8\].* \[64\]"),
        (lambda h: h[SCALE].update(shape=[1, 64]), r"w1.weight_scale' has shape \[1, 64\]"),
        (lambda h: h[NORM].update(dtype="I16"), r"norm.weight' has dtype I16; expected BF16"),
        (lambda h: h[NORM].update(dtype="F32"), r"norm.weight'.* needs 256 bytes, not the 128"),
        (lambda h: h[NORM].update(dtype="Q4"), "unknown dtype 'Q4'"),
        (lambda h: h[NORM].update(shape=[65]), "needs 130 bytes, not the 128"),
        (lambda h: h[NORM].update(shape=[-64]), "impossible shape"),
        (lambda h: h[NORM].update(shape=[64.0]), "impossible shape"),
        (lambda h: h[NORM].update(shape=[True, 64]), "impossible shape"),
        (lambda h: h[NORM].update(shape=[2**62] * 9), "impossible shape"),
        (lambda h: h[NORM].update(data_offsets=[9, 3]), "impossible offsets"),
        (lambda h: h[NORM].update(data_offsets=[0, 128]), "overlaps the one before it"),
        (lambda h: h[NORM].update(extra=1), "dtype, shape and data_offsets, nothing else"),
        (lambda h: h.update({NORM: 5}), "dtype, shape and data_offsets, nothing else"),
        (lambda h: h.update(__metadata__={"format": 1}), "__metadata__"),
        (rename(NORM, "language_model.model.nrom.weight"), "norm.weight' missing; unknown.*nrom"),
        (lambda h: h.pop(NORM), "follows a gap"),
    ],
)
def test_a_wrong_header_is_named_with_file_and_tensor(files, tmp_path, edit, message):
    data = edit_header(files["single"][SINGLE], edit)
    directory = write(tmp_path / "a", {**files["single"], SINGLE: data})
    with pytest.raises(CheckpointError, match=message) as error:
        verify_checkpoint(directory)
    assert str(directory) in str(error.value)


def test_a_missing_tensor_is_named(files, tmp_path):
    def drop_last(header: Header) -> None:
        last = max(
            (k for k in header if k != "__metadata__"), key=lambda k: header[k]["data_offsets"]
        )
        cut.append((last, header.pop(last)["data_offsets"]))

    cut: list = []
    data = edit_header(files["single"][SINGLE], drop_last)
    name, (begin, end) = cut[0]
    directory = write(tmp_path / "a", {**files["single"], SINGLE: data[: begin - end]})
    with pytest.raises(CheckpointError, match=f"tensor '{name}' missing"):
        verify_checkpoint(directory)


@pytest.mark.parametrize("name", ["lm_head.weight", "language_model.model.extra", "vision.x"])
def test_a_surplus_tensor_is_named(files, tmp_path, name):
    def add(header: Header) -> None:
        end = max(v["data_offsets"][1] for k, v in header.items() if k != "__metadata__")
        header[name] = {"dtype": "U8", "shape": [1], "data_offsets": [end, end + 1]}

    data = edit_header(files["single"][SINGLE], add) + b"\0"
    directory = write(tmp_path / "a", {**files["single"], SINGLE: data})
    with pytest.raises(CheckpointError, match=f"model.safetensors: tensor '{name}' unknown"):
        verify_checkpoint(directory)


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b"", "too few"),
        (b"\x10", "too few"),
        (b"\xff" * 40, "not plausible"),
        ((10**6).to_bytes(8, "little") + b"{}", "truncated: the header"),
        (pickle.dumps({"a": 1}, protocol=2), "is a pickle"),
        (b"PK\x03\x04" + b"\x14" * 40, "is a zip archive"),
        (b"GGUF" + b"\x03" * 40, "is a GGUF file"),
        ((2).to_bytes(8, "little") + b"[]", "must be a JSON object"),
        ((2).to_bytes(8, "little") + b"{]", "is not JSON"),
        ((2).to_bytes(8, "little") + b"\xff\xfe", "is not JSON"),
        ((60_000).to_bytes(8, "little") + b"[" * 60_000, "is not JSON"),
        ((13).to_bytes(8, "little") + b'{"a":1,"a":2}', "names 'a' twice"),
        ((2).to_bytes(8, "little") + b"{}xyz", "3 bytes follow"),
    ],
)
def test_a_file_that_is_not_safetensors_is_refused(files, tmp_path, data, message):
    directory = write(tmp_path / "a", {**files["single"], SINGLE: data})
    with pytest.raises(CheckpointError, match=message):
        verify_checkpoint(directory)


def test_a_header_whose_length_looks_like_a_pickle_is_read(tmp_path):
    text = b"{}".ljust(0x0280)
    path = tmp_path / "x.safetensors"
    path.write_bytes(len(text).to_bytes(8, "little") + text)
    assert read_header(path) == {}


def test_a_truncated_shard_is_named(files, tmp_path):
    shards = dict(files["shards"])
    name = sorted(name for name in shards if name.endswith(".safetensors"))[1]
    directory = write(tmp_path / "a", {**shards, name: shards[name][:-1]})
    with pytest.raises(CheckpointError, match=f"{name}: truncated: tensor"):
        verify_checkpoint(directory)


def edit_index(files: dict[str, bytes], edit: Callable[[dict], object]) -> dict[str, bytes]:
    index = json.loads(files[INDEX])
    edit(index)
    return {**files, INDEX: json.dumps(index).encode()}


@pytest.mark.parametrize(
    ("edit", "message"),
    [
        (lambda i: i["weight_map"].pop(NORM), f"'{NORM}' of model-0.* is not listed"),
        (
            lambda i: i["weight_map"].update(ghost=max(i["weight_map"].values())),
            "model-.*: tensor 'ghost' of the index is not in it",
        ),
        (
            lambda i: i["weight_map"].update({NORM: max(i["weight_map"].values())}),
            f"'{NORM}' is in model-00001-.*, the index says",
        ),
        (lambda i: i["weight_map"].update(ghost="none.safetensors"), "none.safetensors: named by"),
        (lambda i: i["weight_map"].update(ghost="../x.safetensors"), "not a plain file name"),
        (lambda i: i["weight_map"].update(ghost=7), "not a plain file name"),
        (lambda i: i["weight_map"].update(ghost="pytorch_model.bin"), "never a pickle"),
        (lambda i: i["weight_map"].update(ghost="config.json"), "not a safetensors file"),
        (lambda i: i.pop("weight_map"), "weight_map must map"),
        (lambda i: i["weight_map"].clear(), "weight_map must map"),
    ],
)
def test_a_wrong_index_is_named(files, tmp_path, edit, message):
    directory = write(tmp_path / "a", edit_index(files["shards"], edit))
    with pytest.raises(CheckpointError, match=message):
        verify_checkpoint(directory)


def test_a_wrong_total_size_is_only_noted(files, tmp_path):
    edited = edit_index(files["shards"], lambda i: i["metadata"].update(total_size=1))
    report = verify_checkpoint(write(tmp_path / "a", edited))
    assert "total_size 1" in report.notes[0]


def test_a_tensor_in_two_shards_is_named(files, tmp_path):
    shards = dict(files["shards"])
    first, second, *_ = sorted(name for name in shards if name.endswith(".safetensors"))
    shards[second] = shards[first]
    directory = write(tmp_path / "a", shards)
    with pytest.raises(CheckpointError, match=f"{second}: tensor '.*' is already in {first}"):
        verify_checkpoint(directory)


def test_a_shard_that_the_index_does_not_name_is_refused(files, tmp_path):
    directory = write(tmp_path / "a", {**files["shards"], "zzz.safetensors": b""})
    with pytest.raises(CheckpointError, match=r"zzz\.safetensors: not named by"):
        verify_checkpoint(directory)


def test_shards_without_an_index_are_refused(files, tmp_path):
    shards = {name: data for name, data in files["shards"].items() if name != INDEX}
    with pytest.raises(CheckpointError, match="holds neither"):
        verify_checkpoint(write(tmp_path / "a", shards))


@pytest.mark.parametrize("name", ["pytorch_model.bin", "model.pt", "consolidated.00.pth"])
def test_a_pickle_is_refused_and_never_opened(files, tmp_path, name):
    class Bomb:
        def __reduce__(self):
            return os.mkdir, (str(tmp_path / "exploded"),)

    config = files["single"]["config.json"]
    directory = write(tmp_path / "a", {"config.json": config, name: pickle.dumps(Bomb())})
    with pytest.raises(CheckpointError, match=f"{name}: only safetensors is read; a pickle can"):
        verify_checkpoint(directory)
    renamed = write(tmp_path / "b", {"config.json": config, SINGLE: pickle.dumps(Bomb())})
    with pytest.raises(CheckpointError, match="is a pickle, not safetensors"):
        verify_checkpoint(renamed)
    assert not (tmp_path / "exploded").exists()


def test_places_that_hold_no_checkpoint(files, tmp_path):
    with pytest.raises(ConfigError, match="does not exist"):
        verify_checkpoint(tmp_path / "nowhere")
    with pytest.raises(ConfigError, match="does not exist"):
        verify_checkpoint(tmp_path)
    write(tmp_path, {"config.json": files["single"]["config.json"]})
    with pytest.raises(CheckpointError, match="holds neither"):
        verify_checkpoint(tmp_path)


def test_a_config_of_another_model_ends_soon(files, tmp_path):
    layers = {"full_attn_layers": [2, 4], "kda_layers": [1, 3]}
    huge = tiny_k3(
        mxfp4=True,
        num_hidden_layers=4,
        linear_attn=layers,
        num_experts=10**9,
        first_k_dense_replace=2,
        vision={},
    )
    directory = write(tmp_path / "a", {**files["single"], "config.json": json.dumps(huge).encode()})
    with pytest.raises(CheckpointError, match="and over 10000 more missing"):
        verify_checkpoint(directory)


MUTATION = st.tuples(
    st.sampled_from(["flip", "cut", "insert", "delete", "digit"]),
    st.floats(0, 1),
    st.integers(0, 255),
)


def mutate(data: bytes, kind: str, where: float, value: int, limit: int) -> bytes:
    """One byte-level change within the first `limit` bytes, where the structure lies."""
    at = min(int(where * limit), len(data) - 1)
    if kind == "flip":
        return data[:at] + bytes([data[at] ^ (value or 1)]) + data[at + 1 :]
    if kind == "cut":
        return data[:at]
    if kind == "insert":
        return data[:at] + bytes([value]) + data[at:]
    if kind == "delete":
        return data[:at] + data[at + 1 + value % 8 :]
    digits = [i for i in range(at, min(at + 200, len(data))) if 0x30 <= data[i] <= 0x39]
    place = digits[0] if digits else at
    return data[:place] + bytes([0x30 + value % 10]) + data[place + 1 :]


@settings(max_examples=300, deadline=None)
@given(target=st.sampled_from(["config", "index", "single", "shard"]), change=MUTATION)
def test_mutated_bytes_pass_or_raise_a_named_error(files, tmp_path_factory, target, change):
    kind = "single" if target == "single" else "shards"
    source = dict(files[kind])
    name = {
        "config": "config.json",
        "index": INDEX,
        "single": SINGLE,
        "shard": sorted(source)[1],
    }[target]
    data = source[name]
    header = 8 + int.from_bytes(data[:8], "little")
    limit = header + 8 if name.endswith(".safetensors") else len(data)
    source[name] = mutate(data, *change, limit)
    directory = write(tmp_path_factory.getbasetemp() / f"mutated-{kind}", source)
    allowed = PeriluneError if target == "config" else CheckpointError
    with contextlib.suppress(allowed):  # whatever else is raised fails the test
        report = verify_checkpoint(directory)
        assert report.num_tensors == count_tensors(files[kind])


def count_tensors(files: dict[str, bytes]) -> int:
    total = 0
    for name, data in files.items():
        if not name.endswith(".safetensors"):
            continue
        header = json.loads(data[8 : 8 + int.from_bytes(data[:8], "little")])
        total += len(header) - ("__metadata__" in header)
    return total
