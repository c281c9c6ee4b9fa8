"""Bits per byte, against a loop over single documents."""

import json
import math

import numpy as np
import pytest
import torch

from perilune.core.errors import ConfigError
from perilune.kernels.common.packing import Packing
from perilune.train.evaluate import evaluate, held_out_sets, packed_in_order
from perilune.train.loop import build_model, validate
from perilune.train.shards import load_shard
from perilune.train.step import DeviceBatch


def test_bits_per_byte_by_brute_force(tiny_run, tiny_data):
    model = build_model(tiny_run)
    shard = load_shard(tiny_data, "validation_prose")
    nats = 0.0
    with torch.no_grad():
        for begin, end in zip(shard.offsets, shard.offsets[1:], strict=False):
            ids = torch.from_numpy(shard.tokens[begin:end].astype(np.int64))
            # A document longer than a row of 64 is read in pieces. The next piece's first token
            # is predicted by the piece before.
            for piece in range(0, len(ids), 64):
                logits = model(ids[piece : piece + 64], Packing.of([len(ids[piece : piece + 64])]))
                targets = ids[piece + 1 : piece + 65]
                log_p = logits[: len(targets)].double().log_softmax(-1)
                nats -= float(log_p.gather(1, targets[:, None]).sum())
    text_bytes = json.loads((tiny_data / "manifest.json").read_text())["shards"][
        "validation_prose"
    ]["text_bytes"]
    expected = nats / math.log(2) / text_bytes
    assert validate(model, tiny_run) == {"bpb/prose": pytest.approx(expected, rel=1e-5)}


@pytest.mark.parametrize(("row_len", "rows"), [(64, 4), (16, 3), (128, 1)])
def test_every_token_is_packed_once_and_in_order(tiny_data, row_len, rows):
    shard = load_shard(tiny_data, "validation_prose")
    batches = list(packed_in_order(shard, row_len, rows, pad_id=0))
    assert {batch.inputs_BL.shape for batch in batches} == {(rows, row_len)}
    ids = np.concatenate([batch.inputs_BL[batch.segments_BL >= 0] for batch in batches])
    assert ids.tolist() == shard.tokens.tolist()
    num_targets = sum(int((batch.targets_BL >= 0).sum()) for batch in batches)
    assert num_targets == len(shard.tokens) - shard.num_documents


def test_evaluation_leaves_the_model_as_it_was(tiny_run, tiny_data):
    model = build_model(tiny_run)
    held_out = next(held_out_sets(tiny_data, 64, 4, 0))
    evaluate(model, [DeviceBatch.of(batch, "cpu") for batch in held_out.batches])
    assert model.training
    evaluate(model.eval(), [])
    assert not model.training


def test_missing_manifest(tmp_path):
    with pytest.raises(ConfigError, match=r"manifest\.json is missing"):
        next(held_out_sets(tmp_path, 64, 4, 0))
