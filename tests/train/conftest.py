"""A run small enough for a test: a K3 of 0.2 M parameters and text that counts upwards."""

import json

import numpy as np
import pytest

from perilune.model.presets import tiny_k3
from perilune.train.archives import sha256
from perilune.train.config import OptimConfig, TrainConfig
from perilune.train.shards import join, save_shard


def counting_shard(num_documents, seed):
    """Documents of 2 to 90 ids that count upwards from a random start (0 is the padding)."""
    rng = np.random.default_rng(seed)
    documents = []
    for length in rng.integers(2, 90, num_documents):
        documents.append((1 + (rng.integers(1, 30) + np.arange(length)) % 126).astype(np.uint16))
    return join(documents)


@pytest.fixture(scope="session")
def tiny_data(tmp_path_factory):
    """A data folder with two kinds of training text and one of validation text."""
    folder = tmp_path_factory.mktemp("data")
    shards = {
        "train_prose": counting_shard(60, 1),
        "train_chat": counting_shard(60, 2),
        "validation_prose": counting_shard(5, 3),
    }
    entries = {}
    for name, shard in shards.items():
        files = {p.name: sha256(p) for p in save_shard(folder, name, shard)}
        entries[name] = {"text_bytes": len(shard.tokens), "files": files}
    (folder / "manifest.json").write_text(json.dumps({"shards": entries}))
    return folder


@pytest.fixture
def tiny_run(tiny_data, tmp_path):
    """Its `TrainConfig`, in a run folder that does not exist yet."""
    return TrainConfig(
        name="tiny",
        # fp32 files, so that what is loaded again can be compared bit by bit.
        model=tiny_k3(mxfp4=True, dtype="float32", num_hidden_layers=4),
        data_dir=str(tiny_data),
        tokenizer_dir=str(tiny_data),
        mixture={"prose": 0.5, "chat": 0.5},
        out_dir=str(tmp_path / "run"),
        steps=6,
        rows=4,
        row_len=64,
        eval_every=3,
        save_every=2,
        log_every=1,
        optim=OptimConfig(peak_lr=1e-2, warmup_steps=1),
    )
